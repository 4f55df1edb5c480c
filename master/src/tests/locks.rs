//! Locks over the service: kept across a restart of the master, and gone with their session.

use std::sync::Arc;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::namespace_server::Namespace;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{GetLockRequest, Kind, Lock, LockKind, LockType, SetLock};
use cavern_work::sessions::SessionStream;
use rustix::io::Errno;
use tonic::Request;

use super::harness::{NoWorkers, TestMaster, eventually, session_before};
use super::mutations::{create, mount, mutate};

fn lock(inode: u64, waiter: u64) -> SetLock {
    let lock = Lock { owner: 5, pid: 50, r#type: LockType::Exclusive.into(), end: 9, ..Lock::default() };
    SetLock { inode, kind: LockKind::Posix.into(), lock: Some(lock), waiter, wait: waiter != 0 }
}

async fn ask(master: &TestMaster, session: u64, seq: u64, set: SetLock) -> i32 {
    mutate(master, session, seq, vec![Change::SetLock(set)]).await.unwrap()[0].errno
}

/// Whose lock stands in the way of one that a session would like to have: 0 for another's, whose number is not told.
async fn holder(master: &TestMaster, session: u64, inode: u64) -> Option<u64> {
    let lock = lock(inode, 0).lock.map(|lock| Lock { session, ..lock });
    let request = GetLockRequest { inode, kind: LockKind::Posix.into(), lock };
    let reply = master.services().get_lock(Request::new(request)).await.unwrap().into_inner();
    reply.lock.map(|lock| lock.session)
}

/// Stays alive until a lock is granted to it; gives the number that waited.
async fn granted(master: &TestMaster, session: &mut SessionStream) -> u64 {
    loop {
        for events in session.next().await.unwrap() {
            for event in events.iter() {
                master.services().watch.acknowledge(session.stream_id(), event.seq, 0);
                if let Some(Event::LockGranted(waiter)) = event.event {
                    return waiter;
                }
            }
        }
    }
}

#[tokio::test]
async fn locks_outlive_the_master_and_end_with_their_session() {
    let mut config = cavern_conf::Config::default();
    config.master.session_lease = cavern_conf::Interval::millis(1500);
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::with(config, dir, Arc::new(NoWorkers)).await.unwrap();
    let root = mount(&master).await.root_inode;
    let watch = |master: &TestMaster, client: &str, earlier| {
        master.services().watch.open(client, session_before(earlier, earlier != 0)).unwrap()
    };
    let (one, other) = (watch(&master, "one", 0), watch(&master, "other", 0));
    let (holding, waiting) = (one.id(), other.id());
    let file = mutate(&master, holding, 1, vec![create(root, "f", Kind::File)]).await.unwrap()[0].inode;
    assert_eq!(holder(&master, holding, file).await, None);
    assert_eq!(ask(&master, holding, 2, lock(file, 0)).await, 0);
    assert_eq!(ask(&master, waiting, 1, lock(file, 8)).await, Errno::AGAIN.raw_os_error());
    assert_eq!((holder(&master, holding, file).await, holder(&master, waiting, file).await), (None, Some(0)));
    drop((one, other));

    let master = master.restart().await;
    let mut other = watch(&master, "other", waiting);
    assert_eq!((other.id(), holder(&master, waiting, file).await), (waiting, Some(0)));
    // The holder does not come back: its lease ends, and the other, which has waited since before the restart, is next.
    let got = tokio::time::timeout(super::harness::PATIENCE, granted(&master, &mut other)).await.unwrap();
    assert_eq!((got, holder(&master, holding, file).await), (8, Some(0)));
    drop(other);
    eventually(|| async { holder(&master, holding, file).await.is_none() }).await;
    master.stop().await;
}
