//! Views: what is below a directory as it was at one moment, read on this host.
//!
//! A view is an image of EROFS, whose files are ranges of devices, and a table of what these ranges are: versions of
//! objects, or blocks of files of an fs-mode mount. `store` finds views and opens them; `fetch` gets image and table
//! from their bucket, once, as any object is read, and `copies` keeps them on this host. `open_view` answers for an
//! open view, out of `image`, `devices` for its devices: `table` says which *run* of a file each byte is in, `part` and
//! `block` read it as the files of mounts are read, by way of workers. `prefetch` brings what comes next, when `ahead`
//! says so.
//!
//! A kernel takes a short answer of a device for its end, and what is behind that for zeros. So whatever is asked for
//! is answered wholly, or not at all: zeros are only what the table says is nothing.

mod ahead;
mod block;
mod copies;
mod devices;
mod fetch;
mod image;
mod open_view;
mod part;
mod prefetch;
mod store;
mod table;

pub use image::ImageFile;
pub use open_view::OpenView;
pub use store::Views;
