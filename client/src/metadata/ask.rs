//! Questions to the master that leads.

/// The call of this name and method, to be awaited: tried for as long as only the master's answer will do, or with
/// another patience until a deadline. The request is made anew for each attempt.
macro_rules! ask {
    ($inner:expr, $name:literal, $method:ident, $request:expr) => {
        ask!($inner, $name, $method, $request, cavern_net::master::RetryPolicy::UntilDeadline, $inner.master.deadline())
    };
    ($inner:expr, $name:literal, $method:ident, $request:expr, $patience:expr, $deadline:expr) => {
        $inner.master.call_as($name, $patience, $deadline, |mut stubs: cavern_net::master::Stubs| {
            let request = $request;
            async move { stubs.namespace.$method(request).await }
        })
    };
}
