//! Requests for block content as they are prepared: decoded and checked, with their blocks looked up and the use of
//! these counted.

use std::ops::Range;

use cavern_net::MAX_DESCRIPTORS;
use cavern_proto::bounded::MAX_ITEMS;
use cavern_proto::chunk::{chunk_count, chunks_touching, is_whole_parts};
use cavern_proto::data::ReadRequest;
use cavern_proto::data::open_request::Item;
use cavern_proto::frame::FrameKind;

use super::{ChecksumUnit, ContentRequest, MAX_INFLIGHT_BYTES, Prepared, Service, ViewBlock, deadline_of};
use crate::fill::BlockSource;
use crate::request_error::Refusal;
use crate::store::{Block, Touch};

/// A block no longer than this is made present as a whole when an open asks for nothing in particular; of a longer one,
/// the first chunk.
const SMALL_BLOCK_BYTES: u32 = 1 << 20;

impl Service {
    /// Decodes and looks up a read.
    ///
    /// # Errors
    /// The request as a whole cannot be served.
    pub(in crate::server) fn prepare_read(
        &self,
        request_id: u64,
        request: ReadRequest,
    ) -> Result<ContentRequest, Refusal> {
        if request.items.len() > MAX_ITEMS {
            return Err(Refusal::bad_request(format!("{} items in one request", request.items.len())));
        }
        let mut payload = 0u64;
        let mut items = Vec::with_capacity(request.items.len());
        for item in request.items {
            let named = item.block.unwrap_or_default();
            let (of_view, source) = (ViewBlock::of(&named), BlockSource::parse(named));
            let (asked, part) = (item.range.unwrap_or_default(), item.part);
            let (mut range, mut unit) = (0..0, ChecksumUnit::Chunk);
            let source = source.and_then(|source| {
                if asked.offset > source.length() {
                    let message = format!("offset {} in a block of {} bytes", asked.offset, source.length());
                    return Err(Refusal::bad_request(message));
                }
                let is_data = matches!(source, BlockSource::Data(_));
                let all = asked.offset..asked.offset.saturating_add(asked.length).min(source.length());
                match part.map(|part| part.offset..part.offset.saturating_add(part.length)) {
                    None => {
                        range = all;
                        if is_data {
                            unit = ChecksumUnit::Sent;
                        }
                    }
                    Some(part) => {
                        let is_within = all.start <= part.start && part.end <= all.end;
                        if is_data || !is_within || !is_whole_parts(&part, source.length()) {
                            let message = format!("{part:?} are no whole parts of {all:?} in a cached block");
                            return Err(Refusal::bad_request(message));
                        }
                        (range, unit) = (part, ChecksumUnit::Part);
                    }
                }
                Ok(source)
            });
            payload += range.len() as u64;
            let wanted = vec![chunks_touching(range.start, range.len() as u32)];
            let touch = Touch::Read(range.len() as u32);
            items.push(Prepared { range, unit, of_view, ..self.look_up(source, wanted, touch) });
        }
        if payload > u64::from(MAX_INFLIGHT_BYTES) {
            let message = format!("{payload} bytes asked for in one request, {MAX_INFLIGHT_BYTES} are the most");
            return Err(Refusal::bad_request(message));
        }
        Ok(ContentRequest { kind: FrameKind::Read, request_id, items, deadline: deadline_of(request.deadline_ms) })
    }

    /// Decodes and looks up an open or a fill.
    ///
    /// # Errors
    /// As [`Self::prepare_read`].
    pub(in crate::server) fn prepare(
        &self,
        kind: FrameKind,
        request_id: u64,
        items: Vec<Item>,
        deadline_ms: u32,
    ) -> Result<ContentRequest, Refusal> {
        let (most, touch) = match kind {
            FrameKind::Open => (MAX_DESCRIPTORS, Touch::Open),
            _ => (MAX_ITEMS, Touch::Refresh),
        };
        if items.len() > most {
            return Err(Refusal::bad_request(format!("{} blocks in one request, {most} are the most", items.len())));
        }
        let items = items.into_iter().map(|item| self.prepare_item(item, touch)).collect();
        Ok(ContentRequest { kind, request_id, items, deadline: deadline_of(deadline_ms) })
    }

    fn prepare_item(&self, item: Item, touch: Touch) -> Prepared {
        let named = item.block.unwrap_or_default();
        let (of_view, source) = (ViewBlock::of(&named), BlockSource::parse(named));
        let length = source.as_ref().map_or(0, |source| source.length());
        let mut wanted: Vec<Range<u32>> = (item.want.iter())
            .map(|range| range.offset.min(length)..range.offset.saturating_add(range.length).min(length))
            .filter(|range| !range.is_empty())
            .map(|range| chunks_touching(range.start, range.len() as u32))
            .collect();
        if item.want.is_empty() && length > 0 {
            wanted.push(if length <= SMALL_BLOCK_BYTES { 0..chunk_count(length) } else { 0..1 });
        }
        join(&mut wanted);
        Prepared { of_view, ..self.look_up(source, wanted, touch) }
    }

    fn look_up(&self, source: Result<BlockSource, Refusal>, wanted: Vec<Range<u32>>, touch: Touch) -> Prepared {
        let block = source.as_ref().ok().and_then(|source| match source {
            BlockSource::Object(object) => self.parts.stores.cache.get(&object.id, touch).open().map(Block::Cached),
            BlockSource::Data(target) => self.parts.stores.data.get(&target.id, touch).open().map(Block::Data),
        });
        Prepared { source, of_view: None, wanted, range: 0..0, unit: ChecksumUnit::Chunk, block, touch }
    }
}

/// Sorts ranges and joins those that touch: a request that names the whole block a million times means it once.
fn join(ranges: &mut Vec<Range<u32>>) {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, last| {
        let touches = next.start <= last.end;
        if touches {
            last.end = last.end.max(next.end);
        }
        touches
    });
    ranges.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_touch_become_one() {
        let joined = |ranges: &[Range<u32>]| {
            let mut ranges = ranges.to_vec();
            join(&mut ranges);
            ranges.into_iter().map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(joined(&[]), []);
        assert_eq!(joined(&[5..6, 0..2, 1..4, 4..5]), [(0, 6)]);
        assert_eq!(joined(&[7..9, 0..2, 1..1]), [(0, 2), (7, 9)]);
        assert_eq!(joined(&vec![0..512; 100_000]), [(0, 512)]);
    }
}
