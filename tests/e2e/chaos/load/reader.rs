//! Reads images of a cache-mode mount, and files of an fs-mode mount that were made before.

use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::Arc;

use rand::Rng;
use rand::rngs::StdRng;
use rustix::fs::Advice;

use super::{Contents, Steps};
use crate::journal::Caller;

pub struct Reader {
    places: [(PathBuf, Arc<Contents>); 2],
    random: StdRng,
}

impl Reader {
    pub fn new(images: (PathBuf, Arc<Contents>), files: (PathBuf, Arc<Contents>), random: StdRng) -> Self {
        Self { places: [images, files], random }
    }
}

impl Steps for Reader {
    fn step(&mut self, caller: &Caller) {
        let (top, contents) = &self.places[self.random.random_range(0..2)];
        let names: Vec<&String> = contents.keys().collect();
        let name = names[self.random.random_range(0..names.len())];
        let path = top.join(name);
        let mut content = Vec::new();
        let read = caller.call("read", &path, || {
            let mut file = File::open(&path)?;
            file.read_to_end(&mut content)?;
            // The next one is to ask for the bytes again.
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?;
            Ok(())
        });
        if read.is_some() {
            assert!(content == contents[name], "{}: {} bytes, wrong content", path.display(), content.len());
        }
    }
}
