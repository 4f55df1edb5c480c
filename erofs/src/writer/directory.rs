//! Packs names into blocks of a directory: twelve bytes of each in front, then the names.

use crate::error::Error;
use crate::format::{BLOCK, DIRENT};
use crate::tree::Kind;

const DOTS: [&[u8]; 2] = [b".", b".."];

/// Is given each block that is full.
pub(super) type Sink<'a> = dyn FnMut(&[u8]) -> Result<(), Error> + 'a;

/// Entries that come in order, and `.` and `..`, which it puts between them.
pub(super) struct Directory {
    /// What `.` and `..` lead to.
    dots: [u64; 2],
    dots_put: usize,
    heads: Vec<u8>,
    names: Vec<u8>,
    /// Blocks that are full.
    pub(super) full: u64,
}

impl Directory {
    pub(super) fn new(own: u64, parent: u64) -> Self {
        Self { dots: [own, parent], dots_put: 0, heads: Vec::new(), names: Vec::new(), full: 0 }
    }

    pub(super) fn add(&mut self, name: &[u8], nid: u64, kind: Kind, sink: &mut Sink<'_>) -> Result<(), Error> {
        self.put_dots(|dot| dot < name, sink)?;
        self.put(name, nid, kind, sink)
    }

    /// The last block as far as it is used; it is never empty.
    pub(super) fn finish(&mut self, sink: &mut Sink<'_>) -> Result<Vec<u8>, Error> {
        self.put_dots(|_| true, sink)?;
        Ok(self.take())
    }

    fn put_dots(&mut self, is_next: impl Fn(&[u8]) -> bool, sink: &mut Sink<'_>) -> Result<(), Error> {
        while let Some(name) = DOTS.get(self.dots_put).filter(|name| is_next(name)) {
            let nid = self.dots[self.dots_put];
            self.dots_put += 1;
            self.put(name, nid, Kind::Directory, sink)?;
        }
        Ok(())
    }

    fn put(&mut self, name: &[u8], nid: u64, kind: Kind, sink: &mut Sink<'_>) -> Result<(), Error> {
        if self.heads.len() + self.names.len() + DIRENT + name.len() > BLOCK {
            let mut block = self.take();
            block.resize(BLOCK, 0);
            sink(&block)?;
            self.full += 1;
        }
        self.heads.extend_from_slice(&nid.to_le_bytes());
        self.heads.extend_from_slice(&(self.names.len() as u16).to_le_bytes());
        self.heads.extend_from_slice(&[kind as u8, 0]);
        self.names.extend_from_slice(name);
        Ok(())
    }

    fn take(&mut self) -> Vec<u8> {
        let mut block = Vec::with_capacity(BLOCK);
        let heads = self.heads.len() as u16;
        for head in self.heads.chunks_exact(DIRENT) {
            let place = u16::from_le_bytes([head[8], head[9]]) + heads;
            block.extend_from_slice(&head[..8]);
            block.extend_from_slice(&place.to_le_bytes());
            block.extend_from_slice(&head[10..]);
        }
        block.extend_from_slice(&self.names);
        self.heads.clear();
        self.names.clear();
        block
    }
}
