//! The metrics pages of all roles, in both forms, by the rules of `promtool check metrics`, and of OpenMetrics 1.0.

use std::collections::HashSet;
use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use cavern_tests::{Child, Cluster, Options, http_request_with};

const ACCEPT_OPEN_METRICS: &str = "Accept: application/openmetrics-text;version=1.0.0\r\n";
/// What names of metrics do not have as a word, but as another unit, or as what the type says.
const ABBREVIATED: [&str; 14] = ["s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"];
const OTHER_UNITS: [&str; 12] = [
    "milliseconds",
    "microseconds",
    "nanoseconds",
    "minutes",
    "hours",
    "days",
    "weeks",
    "bits",
    "kilobytes",
    "megabytes",
    "kibibytes",
    "mebibytes",
];
const TYPES: [&str; 5] = ["counter", "gauge", "histogram", "summary", "untyped"];
const UNITS: [&str; 2] = ["bytes", "seconds"];

#[derive(Debug, Default)]
struct Family {
    name: String,
    kind: String,
    help: String,
    unit: Option<String>,
    samples: Vec<Sample>,
}

#[derive(Debug)]
struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

/// The families of a page, each in one piece.
fn families(page: &str) -> Vec<Family> {
    let mut families: Vec<Family> = Vec::new();
    for line in page.lines().filter(|line| *line != "# EOF") {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            families.push(Family { name: name.to_owned(), help: help.to_owned(), ..Family::default() });
            continue;
        }
        let family = families.last_mut().unwrap_or_else(|| panic!("{line} is before all families"));
        let of_family = |rest: &str| {
            let (name, what) = rest.split_once(' ').unwrap();
            assert_eq!(name, family.name, "{line}");
            what.to_owned()
        };
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            family.kind = of_family(rest);
        } else if let Some(rest) = line.strip_prefix("# UNIT ") {
            family.unit = Some(of_family(rest));
        } else {
            let sample = sample(line);
            assert!(sample.name.starts_with(&family.name) && !family.kind.is_empty(), "{line} in {}", family.name);
            family.samples.push(sample);
        }
    }
    families
}

fn sample(line: &str) -> Sample {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let labels = labels.strip_suffix('}').unwrap_or_else(|| panic!("{line} has labels without an end"));
    // No value of ours has a quote in it.
    let mut parts = labels.split('"').map(str::to_owned);
    let mut pairs = Vec::new();
    while let (Some(label), Some(value)) = (parts.next().filter(|label| !label.is_empty()), parts.next()) {
        pairs.push((label.trim_start_matches(',').trim_end_matches('=').to_owned(), value));
    }
    Sample { name: name.to_owned(), labels: pairs, value: value.parse().unwrap_or_else(|_| panic!("{line}")) }
}

fn is_snake_case(name: &str) -> bool {
    let has_form = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    has_form && name.starts_with(|c: char| c.is_ascii_lowercase()) && !name.contains("__") && !name.ends_with('_')
}

/// What is wrong with a page in the text format.
fn problems(families: &[Family]) -> Vec<String> {
    let (mut problems, mut names, mut series) = (Vec::new(), HashSet::new(), HashSet::new());
    for Family { name, kind, help, samples, .. } in families {
        let mut wrong = |is_wrong: bool, what: &str| {
            if is_wrong {
                problems.push(format!("{name} ({kind}): {what}"));
            }
        };
        let words: Vec<&str> = name.split('_').collect();
        let base = name.strip_suffix("_total").unwrap_or(name);
        wrong(!names.insert(name), "it is there twice");
        wrong(help.trim().is_empty(), "no help");
        wrong(help.contains(['\\', '"']), "its help is not the same in both forms");
        wrong(!is_snake_case(name), "its name is no lower case with underscores");
        wrong(!TYPES.contains(&kind.as_str()), "no type");
        wrong(name.ends_with("_total") != (kind == "counter"), "counters end in _total, and nothing else does");
        let reserved = ["_bucket", "_count", "_sum"];
        wrong(kind != "histogram" && reserved.iter().any(|end| name.ends_with(end)), "it is called as a histogram is");
        wrong(words.iter().any(|word| TYPES.contains(word)), "its type is in its name");
        wrong(words.iter().any(|word| ABBREVIATED.contains(word)), "its unit is abbreviated");
        wrong(words.iter().any(|word| OTHER_UNITS.contains(word)), "its unit is no base unit");
        let has_unit = UNITS.iter().any(|unit| words.contains(unit));
        wrong(has_unit && !UNITS.iter().any(|unit| base.ends_with(unit)), "its unit is not at its end");
        for sample in samples {
            let labels: Vec<&str> = sample.labels.iter().map(|(label, _)| label.as_str()).collect();
            wrong(!labels.iter().all(|label| is_snake_case(label)), "a label is no lower case with underscores");
            let is_bucket = kind == "histogram" && sample.name.ends_with("_bucket");
            wrong(labels.contains(&"le") != is_bucket || labels.contains(&"quantile"), "a label of histograms");
            wrong(sample.value.is_nan(), "a value that is none");
            wrong(kind == "counter" && sample.value < 0.0, "a counter below zero");
            wrong(!series.insert(format!("{} {:?}", sample.name, sample.labels)), "a series is there twice");
        }
        if kind == "histogram" {
            wrong(!has_whole_histograms(name, samples), "its buckets do not go to +Inf, and to its count");
        }
    }
    problems
}

/// Whether the buckets of each histogram grow, and the last one has all that was counted.
fn has_whole_histograms(name: &str, samples: &[Sample]) -> bool {
    let of = |end: &'static str| samples.iter().filter(move |sample| sample.name == format!("{name}_{end}"));
    let own = |sample: &Sample| -> Vec<(String, String)> {
        sample.labels.iter().filter(|(label, _)| label != "le").cloned().collect()
    };
    of("count").all(|count| {
        let buckets: Vec<&Sample> = of("bucket").filter(|bucket| own(bucket) == own(count)).collect();
        let last = buckets.last().filter(|last| last.labels.iter().any(|pair| *pair == ("le".into(), "+Inf".into())));
        buckets.is_sorted_by(|one, next| one.value <= next.value) && last.is_some_and(|last| last.value == count.value)
    })
}

/// What Prometheus's own tool says of a page, where it is installed.
fn ask_promtool(page: &str) {
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut process) = promtool.spawn() else {
        return eprintln!("promtool is not installed: its rules are checked by this test alone");
    };
    process.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let said = process.wait_with_output().unwrap();
    let text = [said.stdout, said.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(said.status.success() && text.is_empty(), "{text}");
}

/// Both forms of a page, and what they have in common.
fn check(role: &str, url: &str, header: &str) {
    let ask = |more: &str| http_request_with("GET", url, &format!("{header}{more}"), "").unwrap();
    let text = ask("");
    assert_eq!(text.status, 200, "{role}: {text:?}");
    assert!(text.head.contains("text/plain; version=0.0.4"), "{role}: {}", text.head);
    check_text(role, &text.body);

    let open_metrics = ask(ACCEPT_OPEN_METRICS);
    assert!(open_metrics.head.contains("application/openmetrics-text; version=1.0.0"), "{}", open_metrics.head);
    assert!(open_metrics.body.ends_with("\n# EOF\n") && open_metrics.body.matches("# EOF").count() == 1);
    let open = families(&open_metrics.body);
    let names = |page: &str| -> HashSet<String> { families(page).into_iter().map(|family| family.name).collect() };
    let expected = open.iter().map(|family| match family.kind.as_str() {
        "counter" => format!("{}_total", family.name),
        "info" => format!("{}_info", family.name),
        _ => family.name.clone(),
    });
    let expected: HashSet<String> = expected.collect();
    // A family is there from its first sample on, which may come between two questions.
    let (before, after) = (names(&text.body), names(&ask("").body));
    assert!(before.is_subset(&expected) && expected.is_subset(&after), "{role}: {before:?} {expected:?} {after:?}");
    for Family { name, kind, unit, samples, .. } in &open {
        let ends_in = UNITS.iter().find(|unit| name.ends_with(&format!("_{unit}"))).map(|unit| (*unit).to_owned());
        assert_eq!(*unit, ends_in, "{role}: the unit of {name}");
        assert!(["counter", "gauge", "histogram", "info"].contains(&kind.as_str()), "{role}: {name} is a {kind}");
        let is_counted = samples.iter().all(|sample| sample.name == format!("{name}_total"));
        assert!(kind != "counter" || is_counted, "{role}: samples of {name}");
    }
}

fn check_text(role: &str, page: &str) {
    let families = families(page);
    assert!(families.len() > 5, "{role}: {page}");
    let problems = problems(&families);
    assert!(problems.is_empty(), "{role}: {problems:#?}");
    assert!(!page.contains("# EOF") && !page.contains("# UNIT"), "{role}: {page}");
    ask_promtool(page);
}

fn children(cluster: &Cluster) -> Vec<(&'static str, Child)> {
    let status = cluster.status();
    let named = |role: &'static str, children: Vec<Child>| children.into_iter().map(move |child| (role, child));
    named("master", status.masters).chain(named("worker", status.workers)).chain(named("fuse", status.fuse)).collect()
}

/// Has all processes do something of each kind.
fn make_busy(cluster: &Cluster) {
    let tree = cluster.seed("bucket", "data/", 20, 2000);
    cluster.mount("s3://bucket/data", "/data", &[]);
    cluster.mount_fs_mode("s3://bucket/work", "/work", &[]);
    cluster.assert_tree("data", "data/", &tree);
    fs::write(cluster.path("work/file"), b"written").unwrap();
    cluster.cv(&["persist", "wait", "/work", "--timeout", "60s"]);
    cluster.cv(&["load", "/data", "--watch"]);
}

#[test]
fn pages_of_all_roles_keep_the_rules_of_prometheus_and_of_open_metrics() {
    let conf = "[master]\npersist_delay = \"100ms\"\n".to_owned();
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    make_busy(&cluster);
    let children = children(&cluster);
    assert_eq!(children.len(), 3);
    for (role, child) in &children {
        check(role, &format!("http://{}/metrics", child.http), "");
    }
    let s3 = cluster.status().s3;
    let token = fs::read_to_string(s3.admin_token.unwrap()).unwrap();
    let admin = s3.admin.unwrap();
    let admin = admin.strip_prefix("http://").unwrap_or(&admin);
    check("dev-s3", &format!("http://{admin}/metrics"), &format!("Authorization: Bearer {}\r\n", token.trim()));
}

#[test]
fn what_a_secured_cluster_counts_besides_keeps_them_too() {
    let conf = "[master]\npersist_delay = \"100ms\"\n".to_owned();
    let cluster = Cluster::up(Options { conf, secure: true, ..Options::default() });
    make_busy(&cluster);
    for (role, child) in children(&cluster) {
        let page = child.page("/metrics").unwrap();
        assert_eq!(page.status, 200, "{role}: {page:?}");
        assert!(page.body.contains("cavern_certificate_expires_seconds "), "{role}: {}", page.body);
        check_text(role, &page.body);
    }
}

#[test]
fn what_breaks_the_rules_is_found() {
    let page = "# HELP a_ms Wrong.\n# TYPE a_ms gauge\na_ms 1\n# HELP b_hits Hits.\n# TYPE b_hits counter\nb_hits 1\n\
        # HELP c_seconds Time.\n# TYPE c_seconds histogram\nc_seconds_sum 1\nc_seconds_count 3\n\
        c_seconds_bucket{le=\"1.0\"} 2\nc_seconds_bucket{le=\"1.7976931348623157e308\"} 3\n\
        # HELP d_bytes_read Bytes.\n# TYPE d_bytes_read gauge\nd_bytes_read{Kind=\"x\"} 1\n\
        d_bytes_read{Kind=\"x\"} 2\n";
    let found = problems(&families(page)).join("\n");
    for wrong in [
        "a_ms (gauge): its unit is abbreviated",
        "b_hits (counter): counters end in _total",
        "c_seconds (histogram): its buckets do not go to +Inf",
        "d_bytes_read (gauge): its unit is not at its end",
        "d_bytes_read (gauge): a label is no lower case",
        "d_bytes_read (gauge): a series is there twice",
    ] {
        assert!(found.contains(wrong), "{wrong} is not in\n{found}");
    }
}
