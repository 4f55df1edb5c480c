//! A plain S3 client that lists a bucket, with one stream of pages or with one for each range of keys, and throws the
//! names away. What listing itself costs, beside an index of the same bucket.

use std::error::Error;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cavern_plain_s3::{PlainS3, PlainS3Error};
use clap::Parser;
use futures::future::try_join_all;
use http::{HeaderMap, Method, StatusCode};

/// What a stream waits after a refusal.
const PAUSE: Duration = Duration::from_millis(50);

#[derive(Parser)]
#[command(about = "Lists a bucket page by page, and prints the rates as JSON")]
struct Options {
    #[arg(long)]
    endpoint: String,
    #[arg(long)]
    access_key: String,
    #[arg(long)]
    secret_key: String,
    #[arg(long)]
    bucket: String,
    /// A string of letters, digits, `-`, `.`, `_` and `/` after which another stream goes on; several in their order.
    #[arg(long = "split")]
    splits: Vec<String>,
    /// Pages of each stream at most; 0 for all.
    #[arg(long, default_value_t = 0)]
    pages: u64,
}

/// What streams have got.
#[derive(Default)]
struct Listed {
    keys: u64,
    pages: u64,
    refused: u64,
}

/// What follows each `<NAME>`, which is `tag`, up to the next tag.
fn elements<'d>(document: &'d str, tag: &'static str) -> impl Iterator<Item = &'d str> {
    document.split(tag).skip(1).filter_map(|rest| rest.split('<').next())
}

/// Lists the keys after `from` (empty for all) up to `until`.
async fn list(client: &PlainS3, options: &Options, from: &str, until: Option<&str>) -> Result<Listed, PlainS3Error> {
    let (mut listed, mut token) = (Listed::default(), String::new());
    loop {
        let query = match (token.is_empty(), from.is_empty()) {
            (true, true) => "list-type=2".to_owned(),
            (true, false) => format!("list-type=2&start-after={}", from.replace('/', "%2F")),
            (false, _) => format!("continuation-token={token}&list-type=2"),
        };
        let answer = client.send(Method::GET, &options.bucket, "", &query, HeaderMap::new(), Bytes::new()).await;
        let page = match answer {
            Ok(answer) => answer.body,
            Err(PlainS3Error::Refused { status: StatusCode::SERVICE_UNAVAILABLE, .. }) => {
                listed.refused += 1;
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        let page = String::from_utf8_lossy(&page);
        listed.pages += 1;
        let mut is_past = false;
        for key in elements(&page, "<Key>") {
            is_past = until.is_some_and(|until| key > until);
            if is_past {
                break;
            }
            listed.keys += 1;
        }
        match elements(&page, "<NextContinuationToken>").next() {
            Some(next) if !is_past && listed.pages != options.pages => next.clone_into(&mut token),
            _ => return Ok(listed),
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let client = PlainS3::new(&options.endpoint, &options.access_key, &options.secret_key)?;
    let starts = std::iter::once("").chain(options.splits.iter().map(String::as_str));
    let ends = options.splits.iter().map(|split| Some(split.as_str())).chain([None]);
    let start = Instant::now();
    let (client, options) = (&client, &options);
    let streams = starts.zip(ends).map(|(from, until)| list(client, options, from, until));
    let streams = try_join_all(streams).await?;
    let seconds = start.elapsed().as_secs_f64();
    let sum = |figure: fn(&Listed) -> u64| streams.iter().map(figure).sum::<u64>();
    let keys = sum(|listed| listed.keys);
    let report = serde_json::json!({
        "streams": streams.len(),
        "keys": keys,
        "pages": sum(|listed| listed.pages),
        "refused": sum(|listed| listed.refused),
        "seconds": seconds,
        "keys_per_second": keys as f64 / seconds,
    });
    #[allow(clippy::print_stdout, reason = "the report is the program's purpose")]
    {
        println!("{report}");
    }
    Ok(())
}
