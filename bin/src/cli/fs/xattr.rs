//! `cv fs setfattr` and `cv fs getfattr`: extended attributes, spelled as the tools of these names spell them.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use cavern_client::Client;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{RemoveXattr, SetXattr, Xattr, XattrMode};
use clap::Args;
use serde_json::json;

use super::change::{in_fs_mode, make};
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
}

#[derive(Args)]
pub struct GetfattrArgs {
    /// Absolute paths in an fs-mode mount.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    /// This attribute only.
    #[arg(short = 'n', long, value_name = "NAME")]
    name: Option<String>,
    /// The value of -n alone, as it is.
    #[arg(long, requires = "name")]
    only_values: bool,
}

impl SetfattrArgs {
    pub async fn run(&self, client: &Client) -> Result<(), CliError> {
        let value = Bytes::from(decode(self.value.as_deref().unwrap_or_default())?);
        let name = self.name.as_ref().or(self.remove.as_ref()).map(String::as_bytes).unwrap_or_default();
        for path in &self.paths {
            let inode = in_fs_mode(client, path, WHAT).await?.inode;
            let (name, value, mode) = (Bytes::copy_from_slice(name), value.clone(), XattrMode::Any.into());
            let change = match self.name {
                Some(_) => Change::SetXattr(SetXattr { inode, name, value, mode, ..SetXattr::default() }),
                None => Change::RemoveXattr(RemoveXattr { inode, name }),
            };
            make(client, path, change).await?;
        }
        Ok(())
    }
}

impl GetfattrArgs {
    pub async fn run(&self, client: &Client, json: bool) -> Result<(), CliError> {
        for path in &self.paths {
            let node = in_fs_mode(client, path, WHAT).await?;
            self.print(path, client.metadata().xattrs(node.inode).await?, json)?;
        }
        Ok(())
    }

    fn print(&self, path: &str, mut xattrs: Vec<Xattr>, json: bool) -> Result<(), CliError> {
        if let Some(name) = &self.name {
            xattrs.retain(|xattr| *xattr.name == *name.as_bytes());
            if xattrs.is_empty() {
                return Err(CliError::NotFound(format!("{path} has no attribute {name}")));
            }
        }
        if self.only_values {
            return xattrs.iter().try_for_each(|xattr| console::raw(&xattr.value));
        }
        let spelled = xattrs.iter().map(|xattr| (String::from_utf8_lossy(&xattr.name), encode(&xattr.value)));
        if json {
            return console::json_line(&json!({"path": path, "xattrs": spelled.collect::<BTreeMap<_, _>>()}));
        }
        if xattrs.is_empty() {
            return Ok(());
        }
        console::line(format_args!("# file: {path}"))?;
        for (name, value) in spelled {
            let quote = if value.starts_with("0s") { "" } else { "\"" };
            console::line(format_args!("{name}={quote}{value}{quote}"))?;
        }
        console::line("")
    }
}

/// A value as it is given: `0x…`, `0s…`, text in quotes, or text.
fn decode(text: &str) -> Result<Vec<u8>, CliError> {
    let wrong = |what: &str| CliError::Usage(format!("\"{text}\" is no value: {what}"));
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let byte = |pair: &[u8]| {
            let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2 && !pair.starts_with('+'))?;
            u8::from_str_radix(pair, 16).ok()
        };
        let bytes = digits.as_bytes().chunks(2).map(byte).collect::<Option<_>>();
        return bytes.ok_or_else(|| wrong("after 0x come pairs of hexadecimal digits"));
    }
    if let Some(base64) = text.strip_prefix("0s").or_else(|| text.strip_prefix("0S")) {
        return STANDARD.decode(base64).map_err(|_| wrong("after 0s comes base64"));
    }
    let quoted = text.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
    Ok(quoted.unwrap_or(text).as_bytes().to_vec())
}

/// A value as it is shown: text where it is text and would be read as such, otherwise base64.
fn encode(value: &[u8]) -> String {
    let is_plain = |text: &&str| {
        let lower = text.to_lowercase();
        !text.contains(|c: char| c.is_control() || c == '"') && !lower.starts_with("0x") && !lower.starts_with("0s")
    };
    match std::str::from_utf8(value).ok().filter(is_plain) {
        Some(text) => text.to_owned(),
        None => format!("0s{}", STANDARD.encode(value)),
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
