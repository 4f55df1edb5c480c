//! Credentials for `cv mount` that are on no command line: from a file, from this command's environment, or from a
//! profile of the shared credentials file. They become options of the mount, as `-c` gives them, and the master keeps
//! them encrypted.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use cavern_proto::Scheme;
use cavern_proto::s3_options::{ACCESS, PREFIX, SECRET, TOKEN};
use clap::Args;

use crate::console;
use crate::error::{CliError, Context as _};

/// As AWS spells them: in lower case in files, in upper case in an environment.
const AWS: [(&str, &str); 3] =
    [("AWS_ACCESS_KEY_ID", ACCESS), ("AWS_SECRET_ACCESS_KEY", SECRET), ("AWS_SESSION_TOKEN", TOKEN)];
/// More is no file of credentials.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Args)]
pub struct CredentialArgs {
    /// Take the credentials from this file, or from standard input (`-`): lines as with -c (s3.credentials.access=KEY,
    /// gs.credentials.key=KEY, azblob.credentials.key=KEY), or AWS_ACCESS_KEY_ID=KEY and so on; a file with [profiles]
    /// as ~/.aws/credentials has will do as well.
    #[arg(long, value_name = "FILE")]
    credentials_file: Option<PathBuf>,
    /// Take them from this command's environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and AWS_SESSION_TOKEN if it
    /// is set.
    #[arg(long, conflicts_with_all = ["credentials_file", "credentials_profile"])]
    credentials_env: bool,
    /// Take them from this profile of --credentials-file, or of AWS_SHARED_CREDENTIALS_FILE or ~/.aws/credentials of
    /// this user. With -c s3.credentials.profile=NAME each process of the cluster looks in its own file instead.
    #[arg(long, value_name = "NAME")]
    credentials_profile: Option<String>,
}

impl CredentialArgs {
    /// What is given with `-c`, and these credentials.
    ///
    /// # Errors
    /// As [`Self::options`], and `Usage` where something is given twice.
    pub fn options_with(&self, given: &[(String, String)]) -> Result<HashMap<String, String>, CliError> {
        let mut options = HashMap::new();
        for (key, value) in given.iter().cloned().chain(self.options()?) {
            if options.insert(key.clone(), value).is_some() {
                return Err(CliError::Usage(format!("{key} is given twice")));
            }
        }
        Ok(options)
    }

    /// The options that they come to: none if none were asked for.
    ///
    /// # Errors
    /// Where they were to be found, and what is wrong there; never what was found.
    pub fn options(&self) -> Result<Vec<(String, String)>, CliError> {
        if self.credentials_env {
            return from_environment(|name| std::env::var(name).ok());
        }
        let profile = self.credentials_profile.as_deref();
        match (&self.credentials_file, profile) {
            (None, None) => Ok(Vec::new()),
            (Some(file), profile) => from_file(file, profile),
            (None, profile) => from_file(&shared_file()?, profile),
        }
    }
}

fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Result<Vec<(String, String)>, CliError> {
    let mut options = Vec::new();
    for (name, option) in AWS {
        match variable(name).filter(|value| !value.is_empty()) {
            Some(value) => options.push((option.to_owned(), value)),
            None if option == TOKEN => {}
            None => return Err(CliError::Usage(format!("{name} is not set in the environment of this command"))),
        }
    }
    Ok(options)
}

fn shared_file() -> Result<PathBuf, CliError> {
    let named = std::env::var_os("AWS_SHARED_CREDENTIALS_FILE").filter(|name| !name.is_empty()).map(PathBuf::from);
    named.or_else(|| std::env::home_dir().map(|home| home.join(".aws/credentials"))).ok_or_else(|| {
        CliError::Usage("this user has no home directory: name the file with --credentials-file".to_owned())
    })
}

fn from_file(path: &Path, profile: Option<&str>) -> Result<Vec<(String, String)>, CliError> {
    let (what, text) = if path == Path::new("-") {
        ("standard input".to_owned(), read(io::stdin().lock()).context("cannot read standard input")?)
    } else {
        let what = path.display().to_string();
        let failed = || format!("cannot read the credentials in {what}");
        let file = File::open(path).context(failed())?;
        let mode = file.metadata().context(failed())?.permissions().mode();
        if mode & 0o077 != 0 {
            console::remark(format_args!("{what} can be read by other users of this host: chmod 600 {what}"));
        }
        let text = read(file).context(failed())?;
        (what, text)
    };
    parse(&text, profile).map_err(|wrong| CliError::Usage(format!("{what}: {wrong}")))
}

fn read(from: impl io::Read) -> io::Result<String> {
    let mut text = String::new();
    from.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// What is wrong is said without a word of a line but its number.
fn parse(text: &str, profile: Option<&str>) -> Result<Vec<(String, String)>, String> {
    let lines = || {
        let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        lines.filter(|(_, line)| !line.is_empty() && !line.starts_with(['#', ';']))
    };
    let section = |line: &str| Some(line.strip_prefix('[')?.strip_suffix(']')?.trim().to_owned());
    let has_profiles = lines().any(|(_, line)| section(line).is_some());
    if !has_profiles && profile.is_some() {
        return Err("it has no [profiles]".to_owned());
    }
    let wanted = profile.unwrap_or("default");
    let (mut is_wanted, mut is_there) = (!has_profiles, !has_profiles);
    let mut options: Vec<(String, String)> = Vec::new();
    for (number, line) in lines() {
        if let Some(name) = section(line) {
            is_wanted = name == wanted;
            is_there |= is_wanted;
            continue;
        }
        if !is_wanted {
            continue;
        }
        let line = line.strip_prefix("export ").unwrap_or(line);
        let (key, value) = line.split_once('=').ok_or_else(|| format!("line {number} has no `=`"))?;
        let (key, value) = (key.trim(), unquoted(value.trim()));
        let known = AWS.iter().find(|(name, _)| name.eq_ignore_ascii_case(key)).map(|(_, option)| *option);
        let option = match known {
            Some(option) => option,
            None if is_option(key) => key,
            // A profile has other settings, too.
            None if has_profiles => continue,
            None => {
                return Err(format!(
                    "line {number} is none of {ACCESS}=, {SECRET}=, {TOKEN}=, or of the AWS_ variables"
                ));
            }
        };
        if options.iter().any(|(given, _)| given == option) {
            return Err(format!("line {number} gives {option} a second time"));
        }
        options.push((option.to_owned(), value.to_owned()));
    }
    if !is_there {
        return Err(format!("it has no profile [{wanted}]"));
    }
    if options.iter().any(|(option, _)| !option.starts_with(PREFIX)) {
        return Ok(options);
    }
    let has = |option: &str| options.iter().any(|(given, value)| given == option && !value.is_empty());
    if !(has(ACCESS) && has(SECRET)) {
        let of = if has_profiles { format!(" in profile [{wanted}]") } else { String::new() };
        return Err(format!(
            "it has no access key and secret key{of}; for a role, a single sign-on or a process, give what the AWS \
             command line exports, with --credentials-env"
        ));
    }
    Ok(options)
}

/// Whether a key is that of an option of some store.
fn is_option(key: &str) -> bool {
    let has_prefix = |scheme: Scheme| key.strip_prefix(scheme.name()).is_some_and(|rest| rest.starts_with('.'));
    Scheme::ALL.into_iter().any(has_prefix)
}

fn unquoted(value: &str) -> &str {
    let inner = |quote: char| value.strip_prefix(quote)?.strip_suffix(quote);
    inner('"').or_else(|| inner('\'')).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(options: Vec<(String, String)>) -> Vec<(String, String)> {
        let mut options = options;
        options.sort();
        options
    }

    fn expected(token: bool) -> Vec<(String, String)> {
        let mut all = vec![(ACCESS, "AK"), (SECRET, "hush=")];
        all.extend(token.then_some((TOKEN, "hush-token")));
        all.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn every_spelling_of_a_file_is_read() {
        for text in [
            "s3.credentials.access=AK\ns3.credentials.secret=hush=\n",
            "# a comment\n\nAWS_ACCESS_KEY_ID=AK\nexport AWS_SECRET_ACCESS_KEY='hush='\n",
            "[other]\naws_access_key_id = x\n[default]\naws_access_key_id = AK\nregion = x\naws_secret_access_key = \
             hush=\n",
        ] {
            assert_eq!(pairs(parse(text, None).unwrap()), expected(false), "{text}");
        }
        let file = "[default]\naws_access_key_id=x\n[ work ]\naws_access_key_id=AK\naws_secret_access_key=\"hush=\"\n\
                    aws_session_token=hush-token\n[z]\naws_access_key_id=y";
        assert_eq!(pairs(parse(file, Some("work")).unwrap()), expected(true));
        let of_azure = vec![("azblob.credentials.key".to_owned(), "hush==".to_owned())];
        assert_eq!(parse("azblob.credentials.key = hush==\n", None).unwrap(), of_azure);
    }

    #[test]
    fn what_is_wrong_is_said_without_secrets() {
        for (text, profile, part) in [
            ("hush", None, "line 1"),
            ("AWS_SECRET_KEY=hush", None, "line 1"),
            ("s3.credentials.secret=hush", None, "no access key"),
            ("s3.credentials.secret=hush\nAWS_SECRET_ACCESS_KEY=hush", None, "second time"),
            ("[a]\naws_access_key_id=hush", None, "[default]"),
            ("[a]\naws_access_key_id=hush", Some("b"), "[b]"),
            ("[a]\nrole_arn=hush", Some("a"), "--credentials-env"),
            ("AWS_ACCESS_KEY_ID=hush", Some("a"), "no [profiles]"),
            ("", None, "no access key"),
        ] {
            let wrong = parse(text, profile).unwrap_err();
            assert!(wrong.contains(part) && !wrong.contains("hush"), "{text}: {wrong}");
        }
    }

    #[test]
    fn an_environment_needs_both_keys() {
        let all = |name: &str| AWS.iter().find(|(known, _)| *known == name).map(|(_, option)| format!("of {option}"));
        assert_eq!(from_environment(all).unwrap().len(), 3);
        assert_eq!(from_environment(|name| all(name).filter(|_| name != "AWS_SESSION_TOKEN")).unwrap().len(), 2);
        let error = from_environment(|name| all(name).filter(|_| name != "AWS_SECRET_ACCESS_KEY")).unwrap_err();
        assert!(error.to_string().contains("AWS_SECRET_ACCESS_KEY"), "{error}");
    }
}
