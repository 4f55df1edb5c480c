//! `cv fs head` and `cv fs tail`.

use clap::Args;

use super::reader::{More, Reader};
use super::walk::each_path;
use crate::cli::connect::ClusterArgs;
use crate::console;
use crate::error::CliError;

/// Read at a time when lines are looked for from the end.
const BACKWARD_BYTES: u64 = 128 << 10;

#[derive(Args)]
pub struct EndArgs {
    /// Absolute paths in the namespace.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    /// So many lines.
    #[arg(short = 'n', long, value_name = "LINES", default_value_t = 10, conflicts_with = "bytes")]
    lines: u64,
    /// So many bytes instead of lines.
    #[arg(short = 'c', long, value_name = "BYTES")]
    bytes: Option<u64>,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// `cv fs head`.
pub async fn head(args: EndArgs) -> Result<(), CliError> {
    args.each(async |reader| {
        let (mut lines, mut bytes) = (args.lines, args.bytes.unwrap_or(u64::MAX));
        if lines == 0 && args.bytes.is_none() || bytes == 0 {
            return Ok(());
        }
        reader
            .read_from(0, |piece| {
                let end = match args.bytes {
                    Some(_) => piece.len().min(usize::try_from(bytes).unwrap_or(usize::MAX)),
                    None => end_of_lines(piece, &mut lines),
                };
                console::raw(&piece[..end])?;
                bytes -= end as u64;
                Ok(if lines == 0 || bytes == 0 { More::No } else { More::Yes })
            })
            .await
    })
    .await
}

/// `cv fs tail`.
pub async fn tail(args: EndArgs) -> Result<(), CliError> {
    args.each(async |reader| {
        let start = match args.bytes {
            Some(bytes) => reader.size().saturating_sub(bytes),
            None => start_of_lines(reader, args.lines).await?,
        };
        reader.read_from(start, |piece| console::raw(piece).map(|()| More::Yes)).await
    })
    .await
}

impl EndArgs {
    /// Shows a part of every file, with headings if there are several.
    async fn each(&self, show: impl AsyncFn(&Reader) -> Result<(), CliError>) -> Result<(), CliError> {
        let mut space = "";
        each_path(&self.cluster, &self.paths, async |client, path| {
            let node = client.metadata().resolve(path).await?;
            let reader = Reader::open(client, path, &node).await?;
            if self.paths.len() > 1 {
                console::line(format_args!("{}==> {path} <==", std::mem::replace(&mut space, "\n")))?;
            }
            show(&reader).await
        })
        .await
    }
}

/// Where the lines that are left end in a piece; counts them down.
fn end_of_lines(piece: &[u8], left: &mut u64) -> usize {
    for (at, _) in piece.iter().enumerate().filter(|(_, byte)| **byte == b'\n') {
        *left -= 1;
        if *left == 0 {
            return at + 1;
        }
    }
    piece.len()
}

/// Where the last lines begin.
async fn start_of_lines(reader: &Reader, lines: u64) -> Result<u64, CliError> {
    let mut end = reader.size();
    if lines == 0 {
        return Ok(end);
    }
    // A newline at the very end ends the last line and begins none.
    let mut left = lines;
    let mut is_last = true;
    while end > 0 {
        let start = end.saturating_sub(BACKWARD_BYTES);
        let piece = reader.read(start, (end - start) as usize).await?;
        for (at, byte) in piece.iter().enumerate().rev() {
            if *byte == b'\n' && !is_last {
                left -= 1;
                if left == 0 {
                    return Ok(start + at as u64 + 1);
                }
            }
            is_last = false;
        }
        end = start;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_across_pieces() {
        let mut left = 3;
        assert_eq!(end_of_lines(b"a\nb\nc", &mut left), 5);
        assert_eq!((left, end_of_lines(b"c\nd\n", &mut left)), (1, 2));
        assert_eq!(left, 0);
    }
}
