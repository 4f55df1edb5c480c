use cavern_conf::process::Metrics;

use super::*;

fn tenants(most: usize) -> Tenants {
    Tenants::new(TenantLimits {
        connections: Limit { most, setting: "x.client_connections" },
        calls: Limit { most, setting: "x.client_calls" },
        per_second: Limit { most: 1000, setting: "x.client_operations_per_second" },
        turns: 2,
        room: 2,
        requests: 2,
        disk_turns: 1,
        streams: 1,
        parts: 1,
        walks: 1,
        writers: 1,
        messages: 1,
    })
}

fn client(name: &str) -> Identity {
    Identity::new("c", Role::Client, name).unwrap()
}

#[tokio::test]
async fn one_has_so_many_and_another_as_many_again() {
    let tenants = tenants(2);
    let connect = |name: &str| tenants.admit(&client(name)).unwrap();
    let (first, _second) = (connect("a").unwrap(), connect("a").unwrap());
    let refused = connect("a").unwrap_err().to_string();
    assert!(refused.starts_with("cavern://c/client/a has 2 connections already"), "{refused}");
    assert!(refused.contains("raise x.client_connections"), "{refused}");
    let other = connect("b").unwrap();
    let calls = [first.call().unwrap(), first.call().unwrap()];
    assert!(first.call().unwrap_err().to_string().contains("2 calls under way already, as many as x.client_calls"));
    assert!(other.call().is_ok());
    drop(calls);
    assert!(first.call().is_ok());
    drop(first);
    assert!(connect("a").is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_tenant_has_a_rate_of_its_own_in_each_mount() {
    let tenants = tenants(2);
    let [one, other] = ["one", "other"].map(|name| tenants.admit(&client(name)).unwrap().unwrap());
    let owes = |tenant: &TenantConnection, mount_id, per_second| {
        let debt = RateCharge::of((**tenant).clone());
        debt.is_in(mount_id, per_second);
        debt.is_in(9, 1);
        debt.wait()
    };
    let wait = |tenant, mount_id| owes(tenant, mount_id, 10);
    while wait(&one, 1).is_zero() {}
    assert_eq!((wait(&other, 1), wait(&one, 2), owes(&one, 3, 0)), Default::default());
    let before = wait(&one, 1);
    assert!(wait(&one, 1) > before);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(wait(&one, 1), Duration::ZERO);
    while wait(&one, 1).is_zero() {}
    assert_eq!(owes(&one, 1, 20), Duration::ZERO, "another rate begins anew");

    let large = RateCharge::of((*one).clone());
    large.is_about_more(29);
    large.is_in(5, 10);
    assert_eq!(large.wait(), Duration::ZERO);
    assert!(wait(&one, 5) > Duration::from_millis(2700));

    let given_up = RateCharge::of((*one).clone());
    assert_eq!(given_up.give_up(), None);
    given_up.is_in(4, 1);
    assert_eq!(given_up.give_up(), Some((4, 1)));
    assert_eq!((owes(&one, 4, 1), given_up.wait()), Default::default());
}

#[tokio::test(start_paused = true)]
async fn rates_of_mounts_that_have_gone_are_forgotten_when_they_are_paid_for() {
    let rates = MountRates::default();
    let owed = rates.of(0, 1).unwrap();
    owed.take(1000);
    for mount_id in 1..1000 {
        rates.of(mount_id, 1).unwrap();
    }
    assert!(rates.are_overdrawn() && !rates.of(0, 1).unwrap().wait().is_zero());
    tokio::time::sleep(Duration::from_secs(2000)).await;
    assert!(!rates.are_overdrawn());
}

#[tokio::test]
async fn only_clients_are_tenants() {
    for role in Role::ALL {
        let is_one = tenants(1).admit(&Identity::new("c", role, "n").unwrap()).is_some();
        assert_eq!(is_one, role == Role::Client, "{role}");
    }
}

#[tokio::test(start_paused = true)]
async fn those_who_are_gone_are_forgotten_and_their_counts_are_not() {
    let tenants = tenants(2);
    let _stays = tenants.admit(&client("stays"));
    let in_debt = tenants.admit(&client("in-debt")).unwrap().unwrap();
    in_debt.rate.take(10_000);
    drop(in_debt);
    for number in 0..3 * REMEMBERED {
        let connection = tenants.admit(&client(&format!("n{number}"))).unwrap().unwrap();
        connection.counts.add_operations(1);
    }
    let known: Vec<String> = tenants.0.known.lock().keys().map(|identity| identity.name.clone()).collect();
    assert!(known.len() <= REMEMBERED, "{}", known.len());
    for name in ["stays", "in-debt"] {
        assert!(known.iter().any(|known| known == name), "{name}");
    }
    let metrics = Metrics::new("test");
    metrics.register_collector(TenantCollector::new(tenants, "cavern_test"));
    let page = metrics.encode().unwrap();
    let operations = |line: &&str| line.starts_with("cavern_test_client_operations_total{");
    let values = page.lines().filter(operations).map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap());
    assert_eq!(values.sum::<u64>(), 3 * REMEMBERED as u64, "{page}");
    assert!(page.contains("cavern_test_client_connections{client=\"stays\"} "), "{page}");
}

#[tokio::test]
async fn what_was_counted_is_shown_by_name() {
    let tenants = tenants(2);
    let connection = tenants.admit(&client("train-1")).unwrap().unwrap();
    connection.counts.add_bytes(5);
    connection.counts.add_wait(Duration::from_millis(1500));
    connection.counts.add_refusal();
    let metrics = Metrics::new("test");
    metrics.register_collector(TenantCollector::new(tenants, "cavern_test"));
    let page = metrics.encode().unwrap();
    for line in [
        "cavern_test_client_bytes_total{client=\"train-1\"} 5",
        "cavern_test_client_waited_seconds_total{client=\"train-1\"} 1.5",
        "cavern_test_client_refused_total{client=\"train-1\"} 1",
        "cavern_test_client_refused_total{client=\"(others)\"} 0",
        "cavern_test_client_connections{client=\"train-1\"} 1",
    ] {
        assert!(page.lines().any(|shown| shown == line), "{line} in {page}");
    }
}
