//! Names of options: each kind of store has its own, and takes no others.

use std::collections::HashMap;

use cavern_proto::Scheme;

use crate::error::UfsError;

/// Refuses an option that mounts of this kind of store do not have.
///
/// # Errors
/// [`UfsError::Invalid`] names the option, and the nearest that there is.
pub(crate) fn check_names(scheme: Scheme, options: &HashMap<String, String>) -> Result<(), UfsError> {
    let known = scheme.options();
    let Some(unknown) = options.keys().filter(|name| !known.contains(&name.as_str())).min() else { return Ok(()) };
    let nearest = known.iter().min_by_key(|name| strsim::damerau_levenshtein(name, unknown));
    let (reason, remedy) = match nearest {
        Some(name) => ("no such option", format!("the nearest that exists is {name}")),
        None => ("no options", format!("leave it out, or use {}", Scheme::S3.form())),
    };
    Err(UfsError::invalid(format!("option {unknown:?}"), format!("{}:// has {reason}", scheme.name()), remedy))
}
