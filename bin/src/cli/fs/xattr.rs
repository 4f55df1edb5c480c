//! `cv fs setfattr` and `cv fs getfattr`: extended attributes, spelled as the tools of these names spell them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use cavern_posix::acl::is_acl;
use cavern_posix::xattr::{NAME_BYTES_MAX, has_kept_prefix, has_length, is_bare_prefix};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{RemoveXattr, SetXattr, Xattr, XattrMode};
use clap::Args;
use serde::Serialize;

use super::change::{in_fs_mode, make};
use super::walk::each_path;
use crate::cli::connect::ClusterArgs;
use crate::console;
use crate::error::CliError;

/// What these commands are about, as refusals name it.
const WHAT: &str = "extended attributes that can be set";

#[derive(Args)]
pub struct SetfattrArgs {
    /// Name of the attribute: user.…, trusted.… or security.…
    #[arg(short = 'n', long, value_name = "NAME", required_unless_present = "remove", conflicts_with = "remove")]
    name: Option<String>,
    /// Its value: text, 0x and hexadecimal digits, or 0s and base64 [default: empty].
    #[arg(short = 'v', long, value_name = "VALUE", requires = "name")]
    value: Option<String>,
    /// Remove this attribute.
    #[arg(short = 'x', long, value_name = "NAME")]
    remove: Option<String>,
    /// Absolute paths in an fs-mode mount.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Args)]
pub struct GetfattrArgs {
    /// Absolute paths in an fs-mode mount.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    /// This attribute only.
    #[arg(short = 'n', long, value_name = "NAME")]
    name: Option<String>,
    /// With the values, not only the names; -n shows the value anyway.
    #[arg(short = 'd', long)]
    dump: bool,
    /// The value of -n alone, as it is.
    #[arg(long, requires = "name", conflicts_with = "json")]
    only_values: bool,
    /// One JSON object per line; values as -v of setfattr takes them.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Serialize)]
struct XattrsView<'a> {
    path: &'a str,
    xattrs: std::collections::BTreeMap<String, String>,
}

impl SetfattrArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let value = decode(self.value.as_deref().unwrap_or_default())?;
        // What is there already can be removed, whatever it is called.
        self.name.as_deref().map_or(Ok(()), check_name)?;
        let name = self.name.as_ref().or(self.remove.as_ref()).map(String::as_bytes).unwrap_or_default();
        let (name, value) = (Bytes::copy_from_slice(name), Bytes::from(value));
        each_path(&self.cluster, &self.paths, async |client, path| {
            let (inode, name) = (in_fs_mode(client, path, WHAT).await?.inode, name.clone());
            let change = if self.name.is_some() {
                let (value, mode) = (value.clone(), XattrMode::Any.into());
                Change::SetXattr(SetXattr { inode, name, value, mode, ..SetXattr::default() })
            } else {
                Change::RemoveXattr(RemoveXattr { inode, name })
            };
            make(client, path, change).await.map(drop)
        })
        .await
    }
}

impl GetfattrArgs {
    pub async fn run(self) -> Result<(), CliError> {
        each_path(&self.cluster, &self.paths, async |client, path| {
            let node = in_fs_mode(client, path, WHAT).await?;
            self.print(path, client.metadata().xattrs(node.inode).await?)
        })
        .await
    }

    fn print(&self, path: &str, mut xattrs: Vec<Xattr>) -> Result<(), CliError> {
        if let Some(name) = &self.name {
            xattrs.retain(|xattr| *xattr.name == *name.as_bytes());
            if xattrs.is_empty() {
                return Err(CliError::NotFound(format!("{path} has no attribute {name}")));
            }
        }
        if self.only_values {
            return xattrs.iter().try_for_each(|xattr| console::raw(&xattr.value));
        }
        let spelled = |xattr: &Xattr| (String::from_utf8_lossy(&xattr.name).into_owned(), encode(&xattr.value));
        if self.json {
            return console::json_line(&XattrsView { path, xattrs: xattrs.iter().map(spelled).collect() });
        }
        if xattrs.is_empty() {
            return Ok(());
        }
        console::line(format_args!("# file: {path}"))?;
        for (name, value) in xattrs.iter().map(spelled) {
            let is_encoded = value.starts_with("0s");
            match self.dump || self.name.is_some() {
                true if is_encoded => console::line(format_args!("{name}={value}"))?,
                true => console::line(format_args!("{name}=\"{value}\""))?,
                false => console::line(name)?,
            }
        }
        console::line("")
    }
}

/// Whether an attribute can be called so.
fn check_name(name: &str) -> Result<(), CliError> {
    let reason = if !has_length(name.as_bytes()) {
        format!("it has 1 to {NAME_BYTES_MAX} bytes, none of them 0")
    } else if is_bare_prefix(name.as_bytes()) {
        format!("something follows the prefix, as in {name}colour")
    } else if !has_kept_prefix(name.as_bytes()) && !is_acl(name.as_bytes()) {
        format!("it begins with user., trusted. or security., as in user.{name}")
    } else {
        return Ok(());
    };
    Err(CliError::Usage(format!("\"{name}\" is no name of an attribute: {reason}")))
}

/// A value as it is given: `0x…`, `0s…`, text in quotes, or text.
fn decode(text: &str) -> Result<Vec<u8>, CliError> {
    let wrong = |what: &str| CliError::Usage(format!("\"{text}\" is no value: {what}"));
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let digits = digits.as_bytes();
        let pairs = digits.chunks(2).map(|pair| {
            let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?;
            pair.bytes().all(|digit| digit.is_ascii_hexdigit()).then(|| u8::from_str_radix(pair, 16).ok())?
        });
        return pairs.collect::<Option<_>>().ok_or_else(|| wrong("after 0x come pairs of hexadecimal digits"));
    }
    if let Some(base64) = text.strip_prefix("0s").or_else(|| text.strip_prefix("0S")) {
        return STANDARD.decode(base64).map_err(|_| wrong("after 0s comes base64"));
    }
    let quoted = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    Ok(quoted.unwrap_or(text).as_bytes().to_vec())
}

/// The same the other way round: text where it is text and would be read as such, otherwise base64.
fn encode(value: &[u8]) -> String {
    match std::str::from_utf8(value) {
        Ok(text)
            if !text.contains(|c: char| c.is_control() || c == '"')
                && !text.to_lowercase().starts_with("0x")
                && !text.to_lowercase().starts_with("0s") =>
        {
            text.to_owned()
        }
        _ => format!("0s{}", STANDARD.encode(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_as_they_are_written() {
        for value in [&b""[..], b"text", b"with \"quotes\"", b"0x12", b"0sYQ==", b"\0\xff", "é".as_bytes(), b"line\n"]
        {
            assert_eq!(decode(&encode(value)).unwrap(), value, "{value:?}");
        }
        assert_eq!(decode("0xfF00").unwrap(), [255, 0]);
        assert_eq!(decode("0sAP8=").unwrap(), [0, 255]);
        assert_eq!(decode("\"a b\"").unwrap(), b"a b");
        for wrong in ["0x1", "0x1g", "0x+1", "0s*"] {
            assert!(decode(wrong).is_err(), "{wrong}");
        }
    }
}
