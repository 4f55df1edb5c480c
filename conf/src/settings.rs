//! Single settings on their way into a [`Config`]: what a file or the environment gives, each with its place.
//!
//! Every setting is checked alone against the schema, so that a mistake is reported with its own line and all mistakes
//! are reported at once. What sections and keys there are is read off the default configuration: the types in
//! [`crate::schema`] are the only list.

use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::budget::{self, AUTO};
use crate::error::{Problem, SettingSource};
use crate::schema::Config;

/// One value that somebody set, of the right type for its key.
#[derive(Debug)]
pub(crate) struct Setting {
    pub section: String,
    pub key: String,
    pub value: toml::Value,
    pub origin: SettingSource,
}

/// Names and defaults of everything that can be set.
pub(crate) struct Schema {
    sections: toml::Table,
}

impl Schema {
    pub fn new() -> Self {
        // The default is made of strings, numbers, booleans and lists: nothing in it can be refused by TOML. A test
        // holds that.
        Self { sections: toml::Table::try_from(Config::default()).unwrap_or_default() }
    }

    /// Sections in the order of the file.
    pub fn sections(&self) -> impl Iterator<Item = (&str, &toml::Table)> {
        self.sections.iter().filter_map(|(name, keys)| Some((name.as_str(), keys.as_table()?)))
    }

    fn names(&self) -> Vec<&str> {
        self.sections().map(|(section, _)| section).collect()
    }

    fn keys(&self, section: &str) -> Option<&toml::Table> {
        self.sections.get(section)?.as_table()
    }

    /// The default of `section.key`, if there is such a key.
    pub fn default_of(&self, section: &str, key: &str) -> Option<&toml::Value> {
        self.keys(section)?.get(key)
    }

    /// What to say about a section that does not exist.
    fn unknown_section(&self, name: &str) -> String {
        let sections = self.names();
        let hint = match nearest(name, &sections) {
            Some(section) => format!("did you mean [{section}]?"),
            None => format!("the sections are {}", sections.join(", ")),
        };
        format!("there is no such section: {hint}")
    }

    /// What to say about a key that does not exist in `section`.
    fn unknown_key(&self, section: &str, key: &str) -> String {
        let keys: Vec<&str> =
            self.keys(section).map(|keys| keys.keys().map(String::as_str).collect()).unwrap_or_default();
        let hint = match (self.owners(key), nearest(key, &keys)) {
            (Some(elsewhere), _) => format!("it belongs in {elsewhere}"),
            (None, Some(near)) => format!("did you mean {near}?"),
            (None, None) => format!("its keys are {}", keys.join(", ")),
        };
        format!("there is no such key in [{section}]: {hint}")
    }

    /// What to say about a key, or another value, above the first section.
    fn outside_of_sections(&self, key: &str) -> String {
        let hint = match self.owners(key) {
            Some(owners) => format!("it belongs below {owners}"),
            None => format!("the sections are {}", self.names().join(", ")),
        };
        format!("stands outside of every section: {hint}")
    }

    /// The sections that have a key of this name; `None` where none has.
    fn owners(&self, key: &str) -> Option<String> {
        let owners = self.sections().filter(|(_, keys)| keys.contains_key(key));
        let owners: Vec<String> = owners.map(|(section, _)| format!("[{section}]")).collect();
        (!owners.is_empty()).then(|| owners.join(" or "))
    }

    /// Checks one value alone. `line_of` turns a place in the value's text into an origin.
    fn check_alone(
        &self,
        (section, key): (&str, &str),
        value: Spanned<DeValue<'_>>,
        origin: SettingSource,
        line_of: impl Fn(Range<usize>) -> SettingSource,
    ) -> Result<Setting, Problem> {
        if value.get_ref().as_str() == Some(AUTO) && budget::follows(section, key) {
            let value = toml::Value::String(AUTO.to_owned());
            return Ok(Setting { section: section.to_owned(), key: key.to_owned(), value, origin });
        }
        let alone = document(section, key, value.clone());
        let typed = Config::deserialize(toml::Deserializer::from(alone));
        match typed.and_then(|_| toml::Value::deserialize(toml::de::ValueDeserializer::from(value))) {
            Ok(value) => Ok(Setting { section: section.to_owned(), key: key.to_owned(), value, origin }),
            Err(error) => {
                let default = self.default_of(section, key).map(|value| show_value(key, value)).unwrap_or_default();
                let message = format!("{} (default: {key} = {default})", error.message());
                // The line of the list entry that is wrong is more use than that of the list.
                let origin = error.span().filter(|span| !span.is_empty()).map_or(origin, line_of);
                Err(Problem { origin, key: format!("{section}.{key}"), message })
            }
        }
    }
}

/// A value as the file would spell it; permissions in octal.
pub(crate) fn show_value(key: &str, value: &toml::Value) -> String {
    match value {
        toml::Value::Integer(mode) if key.ends_with("_mode") => format!("0o{mode:o}"),
        other => other.to_string(),
    }
}

/// A TOML document that sets this one key.
fn document<'t>(section: &str, key: &str, value: Spanned<DeValue<'t>>) -> Spanned<DeTable<'t>> {
    let spanless = |name: &str| Spanned::new(0..0, Cow::Owned(name.to_owned()));
    let mut keys = DeTable::new();
    keys.insert(spanless(key), value);
    let mut root = DeTable::new();
    root.insert(spanless(section), Spanned::new(0..0, DeValue::Table(keys)));
    Spanned::new(0..0, root)
}

/// Everything that a file's text sets. Problems are appended in the order of the file; what is left out for a problem
/// is not among the settings.
pub(crate) fn from_file(path: &Path, text: &str, schema: &Schema, problems: &mut Vec<Problem>) -> Vec<Setting> {
    let at = |offset: usize| SettingSource::File { path: path.to_owned(), line: line_of(text, offset) };
    let root = match DeTable::parse(text) {
        Ok(root) => root.into_inner(),
        Err(error) => {
            let offset = error.span().map_or(0, |span| span.start);
            let message = format!("{}, near \"{}\"", error.message(), line_text(text, offset));
            problems.push(Problem { origin: at(offset), key: String::new(), message });
            return Vec::new();
        }
    };
    let mut settings = Vec::new();
    for (name, value) in root {
        let (section, origin) = (name.get_ref().to_string(), at(name.span().start));
        let known = schema.keys(&section).is_some();
        let keys = match value.into_inner() {
            DeValue::Table(keys) if known => keys,
            DeValue::Table(_) => {
                let message = schema.unknown_section(&section);
                problems.push(Problem { origin, key: format!("[{section}]"), message });
                continue;
            }
            _ => {
                let message = if known {
                    format!("is a section: write [{section}] once, and its keys below it")
                } else {
                    schema.outside_of_sections(&section)
                };
                problems.push(Problem { origin, key: section, message });
                continue;
            }
        };
        for (key, value) in keys {
            let (key, origin) = (key.get_ref().to_string(), at(key.span().start));
            if schema.default_of(&section, &key).is_none() {
                let message = schema.unknown_key(&section, &key);
                problems.push(Problem { origin, key: format!("{section}.{key}"), message });
                continue;
            }
            match schema.check_alone((&section, &key), value, origin, |span| at(span.start)) {
                Ok(setting) => settings.push(setting),
                Err(problem) => problems.push(problem),
            }
        }
    }
    settings
}

/// Everything that the environment sets by `CV_SECTION__KEY`. Names that look so and name no key are refused too: a
/// mistyped override that changes nothing is the worst of both worlds.
pub(crate) fn from_environment(
    variables: impl IntoIterator<Item = (std::ffi::OsString, std::ffi::OsString)>,
    schema: &Schema,
    problems: &mut Vec<Problem>,
) -> Vec<Setting> {
    let mut ours: Vec<(String, std::ffi::OsString)> = variables
        .into_iter()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
        .filter(|(name, _)| name.starts_with("CV_") && name.contains("__"))
        .collect();
    ours.sort();
    let names: Vec<(String, &str, &str)> = schema
        .sections()
        .flat_map(|(section, keys)| keys.keys().map(move |key| (variable_of(section, key), section, key.as_str())))
        .collect();
    let mut settings = Vec::new();
    for (name, value) in ours {
        let origin = SettingSource::Environment(name.clone());
        let Some((_, section, key)) = names.iter().find(|(variable, _, _)| *variable == name) else {
            let variables: Vec<&str> = names.iter().map(|(variable, _, _)| variable.as_str()).collect();
            let hint = match nearest(&name.to_uppercase(), &variables) {
                Some(near) => format!("did you mean {near}?"),
                None => "overrides are spelled CV_SECTION__KEY, as CV_FUSE__MOUNT_POINT".to_owned(),
            };
            let message = format!("this variable names no key of the configuration: {hint}");
            problems.push(Problem { origin, key: String::new(), message });
            continue;
        };
        let name = format!("{section}.{key}");
        let Ok(text) = value.into_string() else {
            problems.push(Problem { origin, key: name, message: "the value is not UTF-8".to_owned() });
            continue;
        };
        // The default says what is expected: where that is a string, `1` and `true` are strings too.
        let default = schema.default_of(section, key);
        let value = match (default, DeValue::parse(&text).ok().map(Spanned::into_inner)) {
            (Some(toml::Value::String(_)), Some(quoted @ DeValue::String(_))) => quoted,
            (Some(toml::Value::String(_)), _) => DeValue::String(Cow::Borrowed(&text)),
            (Some(toml::Value::Array(_)), Some(list @ DeValue::Array(_))) => list,
            (Some(list @ toml::Value::Array(_)), _) => {
                let message = format!("\"{text}\" is not a list: write it with brackets and quotes, as {list}");
                problems.push(Problem { origin, key: name, message });
                continue;
            }
            (_, Some(value)) => value,
            (_, None) => DeValue::String(Cow::Borrowed(&text)),
        };
        match schema.check_alone((section, key), Spanned::new(0..0, value), origin.clone(), |_| origin.clone()) {
            Ok(setting) => settings.push(setting),
            Err(problem) => problems.push(problem),
        }
    }
    settings
}

impl Setting {
    /// Whether it leaves the key to the limits of its process.
    pub fn is_auto(&self) -> bool {
        self.value.as_str() == Some(AUTO) && budget::follows(&self.section, &self.key)
    }
}

/// The variable that overrides a key.
pub(crate) fn variable_of(section: &str, key: &str) -> String {
    format!("CV_{}__{}", section.to_uppercase(), key.to_uppercase())
}

/// The name that was probably meant: at most a third of its letters are wrong, or it contains what was written.
fn nearest<'a>(written: &str, names: &[&'a str]) -> Option<&'a str> {
    let (distance, name) = names
        .iter()
        .map(|name| (strsim::damerau_levenshtein(written, name), *name))
        .min_by_key(|(distance, _)| *distance)?;
    if distance <= (name.len() / 3).max(1) {
        return Some(name);
    }
    let mut containing =
        names.iter().filter(|name| written.len() >= 4 && (name.contains(written) || written.contains(*name)));
    containing.next().filter(|_| containing.next().is_none()).copied()
}

/// The line, counted from 1, of a byte of the text.
pub(crate) fn line_of(text: &str, offset: usize) -> usize {
    let before = text.as_bytes().get(..offset).unwrap_or(text.as_bytes());
    before.iter().filter(|&&byte| byte == b'\n').count() + 1
}

/// The text of that line, cut to what a message can hold.
fn line_text(text: &str, offset: usize) -> String {
    text.lines().nth(line_of(text, offset) - 1).unwrap_or_default().trim().chars().take(60).collect()
}
