//! Tasks on a clock that stands still while any of them works: each step takes a second.

use futures::FutureExt as _;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn rests(_: usize) -> Result<Next, WorkError> {
    Ok(Next::Rest)
}

fn fails(_: usize) -> Result<Next, WorkError> {
    Err(WorkError::unavailable("no majority".into()))
}

fn comes_too_late() -> Result<Next, WorkError> {
    panic!("it is over")
}

/// Has a task work for so many seconds and a half. Gives when its steps began, in seconds, and how it fared then; a
/// step is told its number, from 1.
async fn observed(
    task: BackgroundTask,
    seconds: u32,
    outcome: fn(usize) -> Result<Next, WorkError>,
) -> (Vec<u64>, Vec<TaskStatus>) {
    let (list, group) = (TaskList::default(), TaskGroup::default());
    let (begun, started) = (Arc::new(Mutex::new(Vec::new())), Instant::now());
    list.start(&group, task, begun.clone(), move |begun: &mut Arc<Mutex<Vec<u64>>>| {
        async move {
            let number = {
                let mut begun = begun.lock();
                begun.push(started.elapsed().as_secs());
                begun.len()
            };
            tokio::time::sleep(SECOND).await;
            outcome(number)
        }
        .boxed()
    });
    tokio::time::sleep(SECOND * seconds + SECOND / 2).await;
    let statuses = list.statuses();
    group.shutdown().await;
    assert_eq!(list.statuses(), []);
    let begun = begun.lock().clone();
    (begun, statuses)
}

fn task(pace: Pace) -> BackgroundTask {
    BackgroundTask::new("task", pace)
}

#[tokio::test(start_paused = true)]
async fn a_task_rests_as_its_pace_says() {
    let paces: [(Pace, Vec<u64>); 5] = [
        (Pace::after(SECOND * 2), vec![0, 3, 6, 9]),
        (Pace::every(SECOND * 3), vec![0, 3, 6, 9]),
        (Pace::every(SECOND / 2), (0..=10).collect()),
        (Pace::after_at_least(SECOND * 2, 1), vec![0, 3, 6, 9]),
        (Pace::after_at_least(SECOND * 2, 4), vec![0, 5, 10]),
    ];
    for (pace, expected) in paces {
        let shown = format!("{pace:?}");
        assert_eq!(observed(task(pace), 10, rests).await.0, expected, "{shown}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_task_may_rest_before_its_first_step() {
    let (begun, statuses) = observed(task(Pace::after(SECOND * 2)).resting_first(), 10, rests).await;
    assert_eq!(begun, [2, 5, 8]);
    assert_eq!((statuses[0].runs, statuses[0].state()), (3, TaskState::Idle));
    let (begun, statuses) = observed(task(Pace::after(SECOND * 2)).resting_first(), 1, rests).await;
    assert_eq!((begun.len(), statuses[0].runs, statuses[0].state()), (0, 0, TaskState::Idle));
}

#[tokio::test(start_paused = true)]
async fn a_step_may_say_otherwise() {
    let pace = || Pace::after(SECOND * 100);
    assert_eq!(observed(task(pace()), 10, |_| Ok(Next::RestFor(SECOND * 4))).await.0, [0, 5, 10]);
    let more = |number: usize| Ok(if number < 4 { Next::More } else { Next::Rest });
    assert_eq!(observed(task(pace()), 10, more).await.0, [0, 1, 2, 3]);
    let (begun, statuses) = observed(task(pace()), 10, |_| Ok(Next::End)).await;
    assert_eq!((begun, statuses), (vec![0], vec![]), "it is listed no more");
}

#[tokio::test(start_paused = true)]
async fn failures_in_a_row_slow_a_task_down_unless_others_wait_for_it() {
    let (begun, statuses) = observed(task(Pace::after(SECOND)), 31, fails).await;
    assert_eq!(begun, [0, 2, 5, 10, 19, 30]);
    let [status] = &statuses[..] else { panic!("{statuses:?}") };
    assert_eq!((status.name.as_str(), status.state()), ("task", TaskState::BackingOff));
    assert_eq!((status.runs, status.errors, status.last_run_ms / 1000), (6, 6, 1));
    assert!(status.last_error.contains("no majority"), "{status:?}");
    assert!(status.last_error_age_ms < 1000 && status.last_run_age_ms < 1000, "{status:?}");

    let once_well = |number: usize| if number == 3 { Ok(Next::Rest) } else { fails(number) };
    assert_eq!(observed(task(Pace::after(SECOND)), 10, once_well).await.0, [0, 2, 5, 7, 9]);
    assert_eq!(observed(task(Pace::after(SECOND)).steady(), 7, fails).await.0, [0, 2, 4, 6]);
    let slow = task(Pace::after(SECOND)).with_backoff(Profile::new(SECOND * 4, SECOND * 5, Jitter::None));
    assert_eq!(observed(slow, 20, fails).await.0, [0, 5, 11, 17]);
}

#[tokio::test(start_paused = true)]
async fn what_went_well_is_shown_beside_the_last_failure() {
    let failed_once = |number: usize| if number == 2 { fails(number) } else { Ok(Next::Rest) };
    let (begun, statuses) = observed(task(Pace::after(SECOND)), 7, failed_once).await;
    assert_eq!(begun, [0, 2, 4, 6]);
    assert_eq!(statuses[0].state(), TaskState::Idle);
    assert_eq!((statuses[0].runs, statuses[0].errors), (4, 1));
    assert_eq!((statuses[0].last_error_age_ms / 1000, statuses[0].last_run_age_ms / 1000), (4, 0));
    let (_, statuses) = observed(task(Pace::after(SECOND)), 2, failed_once).await;
    assert_eq!((statuses[0].state(), statuses[0].runs), (TaskState::Running, 1));
}

#[tokio::test(start_paused = true)]
async fn a_signal_ends_a_rest_and_a_pause_after_failures() {
    let outcomes: [fn(usize) -> Result<Next, WorkError>; 2] = [rests, fails];
    for outcome in outcomes {
        let wake = watch::Sender::new(());
        let pace = Pace::after(SECOND * 100).woken_by(wake.subscribe());
        let signals = async {
            tokio::time::sleep(SECOND * 4 + SECOND / 4).await;
            wake.send_replace(());
        };
        let ((begun, _), ()) = tokio::join!(observed(task(pace), 50, outcome), signals);
        assert_eq!(begun, [0, 4]);
    }
    // Where nobody can signal any more, it rests.
    let pace = Pace::after(SECOND * 3).woken_by(watch::Sender::new(()).subscribe());
    assert_eq!(observed(task(pace), 10, rests).await.0, [0, 4, 8]);
}

#[tokio::test(start_paused = true)]
async fn a_step_under_way_is_dropped_when_its_group_is_shut_down() {
    let (list, group, other) = (TaskList::default(), TaskGroup::default(), TaskGroup::default());
    let held = Arc::new(());
    list.start(&group, task(Pace::after(SECOND)), held.clone(), |held| {
        let held = held.clone();
        async move {
            std::future::pending::<()>().await;
            drop(held);
            Ok(Next::Rest)
        }
        .boxed()
    });
    list.start(&other, BackgroundTask::new("other", Pace::after(SECOND)), (), |()| async { Ok(Next::Rest) }.boxed());
    tokio::time::sleep(SECOND).await;
    assert_eq!(Arc::strong_count(&held), 3);
    let names = || list.statuses().into_iter().map(|status| status.name).collect::<Vec<_>>();
    assert_eq!(names(), ["task", "other"]);
    group.shutdown().await;
    assert_eq!(Arc::strong_count(&held), 1);
    assert_eq!(names(), ["other"]);
    // What comes too late does not begin.
    list.start(&group, task(Pace::after(SECOND)), (), |()| async { comes_too_late() }.boxed());
    let once = group.spawn(async { drop(comes_too_late()) });
    group.shutdown().await;
    assert!(once.await.is_ok());
    assert_eq!(names(), ["other"]);
    other.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_not_given_up_half_way_is_waited_for_when_its_group_is_shut_down() {
    let (group, begun) = (Arc::new(TaskGroup::default()), Instant::now());
    let own = group.clone();
    let asked = group.to_the_end(async move {
        own.finish(tokio::time::sleep(SECOND * 5)).await;
        Ok(())
    });
    let ended = async {
        tokio::time::sleep(SECOND).await;
        group.shutdown().await;
        begun.elapsed()
    };
    let (asked, ended) = tokio::join!(asked, ended);
    assert!(asked.is_err() && ended >= SECOND * 5, "{asked:?} after {ended:?}");
}

#[test]
fn a_task_that_goes_on_failing_does_not_flood_the_log() {
    let (mut progress, now) = (TaskProgress::default(), Instant::now());
    assert_eq!(progress.admit_line(now), Some(0));
    assert!((0..59).all(|seconds| progress.admit_line(now + SECOND * seconds).is_none()));
    assert_eq!(progress.admit_line(now + LOG_PERIOD), Some(59));
    assert_eq!(progress.admit_line(now + LOG_PERIOD * 2), Some(0));
}

#[test]
fn long_errors_are_cut() {
    let listed = ListedTask { name: "task".into(), progress: Mutex::default() };
    listed.ended(SECOND, SECOND, Some(&WorkError::Refused("é".repeat(ERROR_MAX + 1))));
    assert_eq!(listed.status().last_error, "é".repeat(ERROR_MAX));
}
