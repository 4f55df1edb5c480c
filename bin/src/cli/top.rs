//! `cv top`: live what mounts, clients and workers do. In a terminal it is drawn anew at each look, and keys sort it;
//! elsewhere each look is printed below the one before.

mod rates;
mod screen;

use cavern_conf::{Interval, process};
use cavern_net::MasterChannel;
use cavern_proto::master::StatusRequest;
use clap::Args;
use tokio::time::Instant;

use self::rates::{Rates, Sample, Sort};
use self::screen::Screen;
use super::connect::{ResultArgs, rpc};
use crate::console;
use crate::error::CliError;

/// Clients and workers tell the masters once a second what they have done.
const SHORTEST: Interval = Interval::secs(1);

#[derive(Args)]
pub struct TopArgs {
    /// What there is most of comes first.
    #[arg(long, value_enum, default_value_t = Sort::Read)]
    sort: Sort,
    /// Time between two looks, from 1s on.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    interval: Interval,
    /// Print what is done in one interval, and end.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    result: ResultArgs,
}

fn interval(text: &str) -> Result<Interval, String> {
    let interval = text.parse::<Interval>()?;
    if interval < SHORTEST { Err(format!("{interval} is shorter than {SHORTEST}")) } else { Ok(interval) }
}

impl TopArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let Self { mut sort, interval, once, result } = self;
        let masters = result.cluster.masters().await?;
        let mut rates = Rates::from(look(&masters).await?);
        let stop = process::shutdown_on_signals();
        let mut screen = if once || result.json { None } else { Screen::open()? };
        // Why the last look failed, if it did: somebody who watches goes on watching.
        let mut failure: Option<String> = None;
        let mut due = Instant::now() + interval.get();
        loop {
            if let Some(screen) = &mut screen {
                screen.draw(sort, |rows| rates.view(sort).lines(Some(rows)), failure.as_deref())?;
            }
            let next = async {
                tokio::time::sleep_until(due).await;
                look(&masters).await
            };
            let looked = tokio::select! {
                looked = next => looked,
                key = Screen::key(&mut screen) => match key {
                    b'q' => return Ok(()),
                    key => {
                        sort = Sort::of_key(key).unwrap_or(sort);
                        continue;
                    }
                },
                () = stop.cancelled() => return Ok(()),
            };
            failure = match looked {
                Ok(sample) => {
                    rates.add(sample);
                    None
                }
                Err(CliError::Unreachable(cause)) if screen.is_some() => Some(cause),
                Err(error) => return Err(error),
            };
            due = Instant::now() + interval.get();
            if screen.is_none() {
                let view = rates.view(sort);
                match (once, result.json) {
                    (true, true) => console::json(&view)?,
                    (false, true) => console::json_line(&view)?,
                    (_, false) => view.lines(None).into_iter().try_for_each(console::line)?,
                }
                if once {
                    return Ok(());
                }
                if !result.json {
                    console::line("")?;
                }
            }
        }
    }
}

/// What the master that leads knows now.
async fn look(masters: &MasterChannel) -> Result<Sample, CliError> {
    let status = masters.ask_unary(rpc!(cluster.status(StatusRequest { activity: true }))).await?;
    Ok(Sample { at: Instant::now(), status })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_once_a_second_is_not_asked_for_more_often() {
        assert_eq!(interval("2s"), Ok(Interval::secs(2)));
        assert!(interval("999ms").unwrap_err().contains("shorter than 1s"));
        assert!(interval("soon").is_err());
    }
}
