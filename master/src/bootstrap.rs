//! How a master gets its place in a group of masters.
//!
//! ```text
//!  data directory          the other masters of cluster.masters            then
//!  has a place             –                                               goes on there
//!  empty, the only master  –                                               begins a cluster of its own
//!  empty, first of all     all answer, and are empty                       founds the cluster, and gives them places
//!  empty                   none has a cluster yet                          waits to be given a place by the first
//!  empty                   have a cluster that does not know this one      waits to be taken in: `cv raft add`
//!  empty                   have a cluster that knows this address          refuses to start: it has lost its data
//! ```
//!
//! A place is never taken by somebody else: whoever lost its data no longer knows how it voted, and voting again could
//! make two leaders of one term.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cavern_conf::host;
use cavern_consensus::{Consensus, FIRST_NODE, Identity, NodeId, PeerConnector, has_log};
use cavern_net::master::innermost;
use cavern_proto::raft::{GetGroupRequest, Group, JoinRequest, Target};
use cavern_state::CurrentDatabase;
use cavern_work::WorkError;
use cavern_work::mounts::{KeyDirectory, SecretSealer};
use tokio::sync::{Mutex, watch};
use tokio::time::Instant;

use crate::blocking::blocking;
use crate::error::MasterError;
use crate::feature_version;

/// Pause between two looks at the others, and the time in which one answers.
const LOOK_PERIOD: Duration = Duration::from_millis(200);
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);
/// How often it is written down what is being waited for.
const REPORT_PERIOD: Duration = Duration::from_secs(10);

/// What is known of this master before it has a place, and where its place is put.
pub struct Bootstrap {
    pub database: Arc<CurrentDatabase>,
    keys: KeyDirectory,
    /// Where others reach this master.
    pub address: String,
    /// To other masters.
    pub connector: PeerConnector,
    place: watch::Sender<Option<Identity>>,
    /// One place is given at a time.
    giving: Mutex<()>,
    /// Once it runs: others may speak to it.
    pub consensus: OnceLock<Arc<Consensus>>,
    /// The keys of the cluster's secrets, once they are there.
    pub sealer: OnceLock<Arc<SecretSealer>>,
}

impl Bootstrap {
    pub fn new(
        database: Arc<CurrentDatabase>,
        keys: KeyDirectory,
        address: String,
        connector: PeerConnector,
    ) -> Result<Self, MasterError> {
        let place = watch::Sender::new(Identity::read(&database.get())?);
        Ok(Self {
            database,
            keys,
            address,
            connector,
            place,
            giving: Mutex::default(),
            consensus: OnceLock::new(),
            sealer: OnceLock::new(),
        })
    }

    /// The keys of the cluster's secrets.
    pub fn sealer(&self) -> Result<&Arc<SecretSealer>, MasterError> {
        self.sealer.get().ok_or_else(starting)
    }

    /// The consensus, for a message that is meant for this master.
    ///
    /// # Errors
    /// [`WorkError::Refused`] for one that is meant for somebody else, or that comes too early.
    pub fn consensus_for(&self, target: Option<&Target>) -> Result<&Arc<Consensus>, MasterError> {
        let place = self.place.borrow();
        let meant = target.is_some_and(|target| {
            place.as_ref().is_some_and(|own| own.cluster_id == target.cluster_id && own.node_id == target.node_id)
        });
        let whom = || target.map_or_else(|| "nobody".to_owned(), |to| format!("{} of {}", to.node_id, to.cluster_id));
        if !meant {
            let own = place.as_ref().map_or_else(
                || "none of any cluster".to_owned(),
                |own| format!("master {} of cluster {}", own.node_id, own.cluster_id),
            );
            let reason = format!("the master at {} is {own}, and not {}", self.address, whom());
            return Err(WorkError::Refused(reason).into());
        }
        self.consensus.get().ok_or_else(starting)
    }

    /// The group as this master knows it.
    pub fn group(&self) -> Group {
        if let Some(consensus) = self.consensus.get() {
            return described(consensus);
        }
        let place = self.place.borrow().clone();
        Group {
            node_id: place.as_ref().map_or(0, |place| place.node_id),
            cluster_id: place.map(|place| place.cluster_id).unwrap_or_default(),
            address: self.address.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            feature_version: feature_version::known_at(&self.address),
            wall_ns: host::wall_ns(),
            ..Group::default()
        }
    }

    /// Takes a place that is given.
    ///
    /// # Errors
    /// [`WorkError::Refused`] when this master has another place.
    pub async fn join(&self, request: JoinRequest) -> Result<(), MasterError> {
        let _giving = self.giving.lock().await;
        let JoinRequest { cluster_id, node_id, secret_key } = request;
        if cluster_id.is_empty() || node_id == 0 {
            return Err(WorkError::Invalid("a place in no cluster".into()).into());
        }
        let own = self.place.borrow().clone();
        if let Some(own) = own {
            if (own.cluster_id.as_str(), own.node_id) == (cluster_id.as_str(), node_id) {
                return Ok(());
            }
            let reason = format!(
                "the master at {} is master {} of cluster {} already: to take it in elsewhere, stop it, move {} away \
                 and start it",
                self.address,
                own.node_id,
                own.cluster_id,
                self.keys.path().display()
            );
            return Err(WorkError::Refused(reason).into());
        }
        self.take(Identity { cluster_id, node_id, founds: None }, Some(secret_key.to_vec())).await
    }

    /// Keeps the place of the one that begins a new cluster with these masters.
    async fn found(&self, cluster_id: String, masters: &[String]) -> Result<Identity, MasterError> {
        let place = Identity { cluster_id, node_id: FIRST_NODE, founds: Some(masters.to_vec()) };
        self.take(place.clone(), None).await?;
        Ok(place)
    }

    /// Keeps a place, with the key of the cluster's secrets where that comes from elsewhere.
    async fn take(&self, place: Identity, key: Option<Vec<u8>>) -> Result<(), MasterError> {
        let (database, keys, kept) = (self.database.clone(), self.keys.clone(), place.clone());
        blocking(move || {
            if let Some(key) = key {
                keys.adopt(&key)?;
            }
            Ok(kept.write(&database.get())?)
        })
        .await?;
        self.place.send_replace(Some(place));
        Ok(())
    }

    /// Returns this master's place, when it has one. `masters` is `cluster.masters`.
    ///
    /// # Errors
    /// [`MasterError::LostPlace`] for one that has lost its data.
    pub async fn place(&self, masters: &[String], new_cluster_id: String) -> Result<Identity, MasterError> {
        let known = self.place.borrow().clone();
        let place = match known {
            Some(place) => place,
            None if masters == [self.address.as_str()] => self.found(new_cluster_id, masters).await?,
            None => self.wait_for_place(masters, new_cluster_id).await?,
        };
        // Later the members are those of the log.
        if let Some(members) = &place.founds
            && !has_log(&self.database.get())?
        {
            self.give_places(&place.cluster_id, members).await?;
        }
        Ok(place)
    }

    async fn wait_for_place(&self, masters: &[String], new_cluster_id: String) -> Result<Identity, MasterError> {
        let is_first = masters.first() == Some(&self.address);
        let mut given = self.place.subscribe();
        let mut reported: Option<Instant> = None;
        loop {
            if let Some(place) = given.borrow_and_update().clone() {
                return Ok(place);
            }
            let others: Vec<&String> = masters.iter().filter(|master| **master != self.address).collect();
            let looks = futures::future::join_all(others.iter().map(|master| ask_group(&self.connector, master))).await;
            let found = looks.iter().flatten().find(|group| !group.cluster_id.is_empty() && !group.members.is_empty());
            let own = found.and_then(|group| group.members.iter().find(|member| member.address == self.address));
            if let Some((group, own)) = found.zip(own)
                && given.borrow().is_none()
            {
                return Err(MasterError::LostPlace {
                    cluster_id: group.cluster_id.clone(),
                    node_id: own.node_id,
                    address: self.address.clone(),
                    data_dir: self.keys.path().to_owned(),
                });
            }
            let silent: Vec<&str> = others
                .iter()
                .zip(&looks)
                .filter(|(_, answer)| answer.is_err())
                .map(|(master, _)| master.as_str())
                .collect();
            let all_empty = silent.is_empty() && looks.iter().flatten().all(|group| group.cluster_id.is_empty());
            if is_first && all_empty {
                return self.found(new_cluster_id, masters).await;
            }
            if reported.is_none_or(|at| at.elapsed() >= REPORT_PERIOD) {
                let waits_for = match (found, is_first) {
                    (Some(group), _) => {
                        format!("to be taken into cluster {}: `cv raft add {}`", group.cluster_id, self.address)
                    }
                    (None, true) => format!("for the masters at {} to found a cluster with", silent.join(", ")),
                    (None, false) => {
                        format!("for the master at {} to found a cluster", masters.first().map_or("", String::as_str))
                    }
                };
                // Not at once: the others may be starting, too.
                if reported.is_some() {
                    tracing::info!("the master at {} waits {waits_for}", self.address);
                }
                reported = Some(Instant::now());
            }
            // The place may come meanwhile; its sender lives as long as this.
            let _given = tokio::time::timeout(LOOK_PERIOD, given.changed()).await;
        }
    }

    /// Gives all others of a new cluster their places.
    async fn give_places(&self, cluster_id: &str, members: &[String]) -> Result<(), MasterError> {
        for (node_id, address) in (FIRST_NODE..).zip(members).skip(1) {
            let mut reported = Instant::now();
            while let Err(error) = self.give_place(cluster_id, node_id, address).await {
                if matches!(error, MasterError::Work(WorkError::Refused(_))) {
                    return Err(error);
                }
                if reported.elapsed() >= REPORT_PERIOD {
                    tracing::info!("the master at {address} has no place in the new cluster yet: {error}");
                    reported = Instant::now();
                }
                tokio::time::sleep(LOOK_PERIOD).await;
            }
        }
        Ok(())
    }

    /// Gives the empty master at an address a place.
    ///
    /// # Errors
    /// [`WorkError::Refused`] when it has another, [`MasterError::Unreachable`] when it does not answer.
    pub async fn give_place(&self, cluster_id: &str, node_id: NodeId, address: &str) -> Result<(), MasterError> {
        let keys = self.keys.clone();
        // Made here if this is a new cluster.
        let key = blocking(move || Ok(SecretSealer::key_in_use(&keys)?)).await?;
        let request = JoinRequest { cluster_id: cluster_id.to_owned(), node_id, secret_key: key.into() };
        let mut calls = self.connector.calls(address)?;
        answered(address, calls.join(request)).await.map(drop)
    }
}

fn starting() -> MasterError {
    WorkError::unavailable("this master is starting".to_owned()).into()
}

/// What another master answers.
async fn answered<T>(
    address: &str,
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, MasterError> {
    let unreachable = |cause| Err(MasterError::Unreachable { address: address.to_owned(), cause });
    match tokio::time::timeout(LOOK_TIMEOUT, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) if status.code() == tonic::Code::FailedPrecondition => {
            Err(WorkError::Refused(status.message().to_owned()).into())
        }
        Ok(Err(status)) => unreachable(innermost(&status)),
        Err(_elapsed) => unreachable("it does not answer".to_owned()),
    }
}

/// The group as a master sees it, with what this program knows.
pub fn described(consensus: &Consensus) -> Group {
    Group {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        feature_version: feature_version::known_at(&consensus.address),
        wall_ns: host::wall_ns(),
        ..consensus.group()
    }
}

/// What the master at an address says of its group.
pub async fn ask_group(connector: &PeerConnector, address: &str) -> Result<Group, MasterError> {
    let mut calls = connector.calls(address)?;
    answered(address, calls.get_group(GetGroupRequest {})).await
}
