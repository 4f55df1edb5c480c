//! Clients of a simulation. Each has one call under way at a time. A change that has no answer is sent again, under its
//! number, to whichever master; a read that has none is given up. Names are few, so that clients get in each other's
//! way.

use std::sync::Arc;
use std::time::Duration;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::{CreateInode, Kind, RemoveName, RenameName, SetAttr};
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};

use super::history::{Asked, Told};
use super::master::{MASTERS, Refusal, SimulatedMaster};
use super::runtime::Chance;
use super::world::{Links, World};

/// For one answer.
const PATIENCE: Duration = Duration::from_secs(2);
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// The masters, and what clients know of their namespace.
pub struct Group {
    pub world: Arc<World>,
    pub masters: Vec<Arc<SimulatedMaster>>,
    pub directories: Mutex<Vec<u64>>,
    pub inodes: Mutex<Vec<u64>>,
}

impl Group {
    /// A call over the network.
    pub async fn ask(&self, client: u64, to: u64, asked: Asked) -> Result<Told, Refusal> {
        let (own, master) = (Links::CLIENTS + client, &self.masters[to as usize - 1]);
        self.world.carry(own, to).await.map_err(|_| Refusal::Unknown)?;
        let told = master.answer(asked).await;
        self.world.carry(to, own).await.map_err(|_| Refusal::Unknown)?;
        told
    }
}

/// One client, and what it remembers.
pub struct Client {
    group: Arc<Group>,
    number: u64,
    chance: Chance,
    seq: u64,
    /// Calls of a thousand that read.
    reads: u64,
    /// The master that it thinks leads.
    leader: u64,
}

impl Client {
    pub fn new(group: Arc<Group>, number: u64) -> Self {
        let mut chance = Chance::new(group.world.chance.lock().next());
        let (leader, reads) = (1 + chance.below(MASTERS), chance.of(&[200, 500, 950]));
        Self { group, number, chance, seq: 0, reads, leader }
    }

    /// Makes so many calls; or fewer, if it dies.
    pub async fn run(mut self, calls: usize) {
        for _ in 0..calls {
            sleep(self.chance.millis(0, 200)).await;
            if self.chance.permille(self.reads) {
                let asked = self.read();
                self.ask_once(asked).await;
            } else if !self.change().await {
                return;
            }
        }
    }

    fn name(&mut self) -> String {
        self.chance.of(&NAMES).to_owned()
    }

    fn directory(&mut self) -> u64 {
        let directories = self.group.directories.lock();
        // The root most of all.
        if self.chance.permille(500) { directories[0] } else { self.chance.of(directories.as_slice()) }
    }

    fn inode(&mut self) -> u64 {
        self.chance.of(self.group.inodes.lock().as_slice())
    }

    fn read(&mut self) -> Asked {
        match self.chance.below(3) {
            0 => Asked::Lookup { parent: self.directory(), name: self.name() },
            1 => Asked::Stat { inode: self.inode() },
            _ => Asked::List { directory: self.directory() },
        }
    }

    fn some_change(&mut self) -> Change {
        let (parent, name) = (self.directory(), self.name().into());
        match self.chance.below(10) {
            0..4 => {
                let kind = if self.chance.permille(300) { Kind::Directory } else { Kind::File } as i32;
                let mode = 0o600 + self.chance.below(8) as u32;
                Change::Create(CreateInode { parent, name, kind, mode, ..CreateInode::default() })
            }
            4..6 => Change::Remove(RemoveName { parent, name, directory: self.chance.permille(300) }),
            6..8 => {
                let (new_parent, new_name) = (self.directory(), self.name().into());
                Change::Rename(RenameName { parent, name, new_parent, new_name, ..RenameName::default() })
            }
            _ => {
                let mode = Some(0o600 + self.chance.below(8) as u32);
                Change::SetAttr(SetAttr { inode: self.inode(), mode, ..SetAttr::default() })
            }
        }
    }

    async fn send(&mut self, asked: Asked) -> Option<Told> {
        // Another may think that it leads.
        let asks_another = !matches!(asked, Asked::Change { .. }) && self.chance.permille(150);
        let to = if asks_another { 1 + self.chance.below(MASTERS) } else { self.leader };
        match timeout(PATIENCE, self.group.ask(self.number, to, asked)).await {
            Ok(Ok(told)) => return Some(told),
            _ if asks_another => {}
            Ok(Err(Refusal::NotLeading(Some(leader)))) => self.leader = leader,
            Ok(Err(_)) | Err(_) => self.leader = 1 + self.chance.below(MASTERS),
        }
        None
    }

    async fn ask_once(&mut self, asked: Asked) {
        let world = self.group.world.clone();
        let call = world.history.lock().begin(self.number, asked.clone(), world.now_ms());
        if let Some(told) = self.send(asked).await {
            world.history.lock().end(call, told, world.now_ms());
        }
    }

    /// Makes a change, however long that takes. Returns whether the client lives on.
    async fn change(&mut self) -> bool {
        self.seq += 1;
        let change = self.some_change();
        let asked = Asked::Change { session: self.number, seq: self.seq, change: change.clone() };
        let world = self.group.world.clone();
        let call = world.history.lock().begin(self.number, asked.clone(), world.now_ms());
        let told = loop {
            if let Some(told) = self.send(asked.clone()).await {
                break told;
            }
            if self.chance.permille(10) {
                return false;
            }
            sleep(self.chance.millis(10, 100)).await;
        };
        if let (Change::Create(create), Told::Changed(Ok(inode))) = (change, &told) {
            self.group.inodes.lock().push(*inode);
            if create.kind() == Kind::Directory {
                self.group.directories.lock().push(*inode);
            }
        }
        world.history.lock().end(call, told, world.now_ms());
        true
    }
}
