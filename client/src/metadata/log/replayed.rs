//! Changes that the process before had asked for, and that had no answer when it died, or whose answer the kernel has
//! not got. The kernel asks for the same once more; its request gets the answer that it would have had, instead of a
//! second change.

use std::mem::discriminant;
use std::sync::Arc;

use cavern_proto::master::mutation::Change;
use futures::future::{Shared, join_all};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::operation::Answer;
use crate::error::ClientError;
use crate::journal::RequestContext;

/// Changes of the process before that may be asked for again, in the order in which they were asked for.
#[derive(Default)]
pub(in crate::metadata) struct Replayed(Mutex<Vec<Earlier>>);

/// A change that was asked for by the process before.
pub(in crate::metadata) struct Earlier {
    /// And for which request; `None` when that has been asked again.
    pub asked: Option<(Change, Arc<RequestContext>)>,
    pub answer: Shared<oneshot::Receiver<Answer>>,
    /// That process had answered it.
    pub was_answered: bool,
}

impl Replayed {
    pub fn add(&self, earlier: Earlier) {
        self.0.lock().push(earlier);
    }

    pub fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// What is known is forgotten: the kernel has asked again for whatever it had no answer to.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.0.lock());
        drop(all);
    }

    /// The answer to what this request had asked for, if that was a change of this kind. What it had asked for before
    /// that it will not ask for again.
    pub async fn answer_to(&self, change: &Change) -> Option<Answer> {
        let context = RequestContext::current()?;
        let (earlier, answer) = self.take(context.unique(), change)?;
        context.go_on_from(earlier);
        let answer = answer.await.unwrap_or(Err(ClientError::Shutdown));
        (!is_asked_anew(change)).then_some(answer)
    }

    fn take(&self, unique: u64, change: &Change) -> Option<(Arc<RequestContext>, Shared<oneshot::Receiver<Answer>>)> {
        for earlier in self.0.lock().iter_mut() {
            let Some((asked, context)) = earlier.asked.take_if(|(_, context)| context.unique() == unique) else {
                continue;
            };
            if discriminant(&asked) == discriminant(change) {
                return Some((context, earlier.answer.clone()));
            }
        }
        None
    }

    /// The number under which this request waited for a lock in the process before.
    pub fn waiter(&self) -> Option<u64> {
        let context = RequestContext::current()?;
        self.0.lock().iter().find_map(|earlier| match &earlier.asked {
            Some((Change::SetLock(set), asked)) if set.waiter != 0 && asked.unique() == context.unique() => {
                Some(set.waiter)
            }
            _ => None,
        })
    }

    /// Completes with the errors of those that the process before had answered, when all are answered, or nobody waits
    /// for them any more.
    pub async fn answered(&self) -> Vec<ClientError> {
        let all: Vec<_> = self.0.lock().iter().map(|earlier| (earlier.was_answered, earlier.answer.clone())).collect();
        let (counts, answers): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let answers = join_all(answers).await.into_iter().map(|answer| answer.unwrap_or(Err(ClientError::Shutdown)));
        counts.into_iter().zip(answers).filter(|(counts, _)| *counts).filter_map(|(_, answer)| answer.err()).collect()
    }
}

/// A commit says what is left to be committed, and a lock that is waited for how things stand: both are asked for anew,
/// when what was asked for before is answered.
fn is_asked_anew(change: &Change) -> bool {
    match change {
        Change::Commit(_) | Change::SetOpenRefs(_) => true,
        Change::SetLock(set) => set.waiter != 0,
        _ => false,
    }
}
