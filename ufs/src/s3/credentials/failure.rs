//! Why there are no credentials.

use std::error::Error;

use crate::allowed::not_allowed;
use crate::error::{Request, UfsError, chain};
use crate::s3::failure::Failure;
use crate::s3::keys::KeyError;

impl KeyError {
    /// What it means that `giver` was asked, and this came of it. `secrets` were sent, or belong to the two parties.
    pub(super) fn of(failure: &Failure, giver: &str, secrets: &[&str]) -> Self {
        match failure {
            Failure::Status { status, code, message, .. } => {
                let mut reason = format!("{giver} answers {failure}");
                for part in [code, message].into_iter().filter(|part| !part.is_empty()) {
                    reason.push_str(": ");
                    reason.push_str(&without(part, secrets));
                }
                const PASSING: [&str; 5] =
                    ["Throttling", "RequestLimitExceeded", "IDPCommunicationError", "InternalFailure", "InternalError"];
                let is_passing = status.is_server_error()
                    || matches!(status.as_u16(), 408 | 429)
                    || PASSING.iter().any(|passing| code.starts_with(passing));
                if is_passing { Self::Unavailable(reason) } else { Self::Refused(reason) }
            }
            Failure::Broken { source, .. } => match not_allowed(&**source) {
                Some(refused) => Self::NotAllowed(refused),
                None => Self::Unavailable(format!("{giver}: {}", chain(failure))),
            },
            Failure::Shorter { .. } | Failure::MalformedReply(_) => Self::senseless(giver),
        }
    }

    /// This failure, where there were credentials before, which have ended.
    pub(super) fn after_the_end(self) -> Self {
        self.after("those of before have ended, and there are no others")
    }

    /// This failure, behind what came to nothing before.
    pub(super) fn after(self, what: &str) -> Self {
        let said = |reason| format!("{what}: {reason}");
        match self {
            Self::Unavailable(reason) => Self::Unavailable(said(reason)),
            Self::Refused(reason) => Self::Refused(said(reason)),
            Self::NotAllowed(error) => Self::NotAllowed(error),
        }
    }

    /// An answer that cannot be used, which may be that of something else at this address.
    pub(crate) fn senseless(giver: &str) -> Self {
        Self::Refused(format!("the answer of {giver} has no credentials that can be used"))
    }

    /// The one among the causes of an error, if it is there.
    pub(super) fn among(error: &(dyn Error + 'static)) -> Option<Self> {
        let mut next = Some(error);
        while let Some(cause) = next {
            if let Some(error) = cause.downcast_ref::<Self>() {
                return Some(error.clone());
            }
            next = cause.source();
        }
        None
    }

    /// What it means for `request`.
    pub(crate) fn into_ufs(self, request: Request) -> UfsError {
        match self {
            Self::Unavailable(reason) => UfsError::Unavailable { request, reason: format!("no credentials: {reason}") },
            Self::Refused(reason) => UfsError::denied(request, reason),
            Self::NotAllowed(error) => error,
        }
    }
}

/// A server's own words, should it repeat what it was told.
fn without(text: &str, secrets: &[&str]) -> String {
    const LONGEST: usize = 300;
    let hide = |text: String, secret: &&str| if secret.is_empty() { text } else { text.replace(*secret, "***") };
    secrets.iter().fold(text.to_owned(), hide).chars().filter(|c| !c.is_control()).take(LONGEST).collect()
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, StatusCode};

    use super::*;

    #[test]
    fn what_a_server_repeats_is_not_shown() {
        let document = "<ErrorResponse><Error><Code>AccessDenied</Code><Message>not for hush\n you</Message></Error>\
                        </ErrorResponse>";
        let refused = Failure::status(StatusCode::FORBIDDEN, &HeaderMap::new(), document.as_bytes());
        let error = KeyError::of(&refused, "STS", &["", "hush"]).to_string();
        assert_eq!(error, "STS answers 403 Forbidden: AccessDenied: not for *** you");
    }

    #[test]
    fn what_may_pass_is_asked_again() {
        for (status, code, passes) in [
            (500, "", true),
            (429, "", true),
            (400, "Throttling", true),
            (400, "IDPCommunicationError", true),
            (400, "ExpiredTokenException", false),
            (403, "AccessDenied", false),
            (404, "", false),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            let document = format!("<Error><Code>{code}</Code></Error>");
            let failure = Failure::status(status, &HeaderMap::new(), document.as_bytes());
            let error = KeyError::of(&failure, "STS", &[]);
            assert_eq!(matches!(error, KeyError::Unavailable(_)), passes, "{error}");
        }
    }
}
