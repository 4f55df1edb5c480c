//! Commands of any content: whatever is in the log, a master applies it. One that panicked, or stopped, would do so
//! again at each start.

use std::collections::HashMap;

use cavern_proto::master::{Mount, Mutation, Worker, WriteType};
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{AttachMount, Command, InitCluster, Mutate, PutWorker};
use cavern_state::{Database, Family, Outcome, StateError, Tables, Transaction, apply, records};
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint};
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use rocksdb::IteratorMode;

use super::harness::number_from_environment;

/// Sequences, unless the environment asks for more.
const ROUNDS: u64 = 60;
const COMMANDS: usize = 150;
/// Messages within messages.
const DEPTH: u32 = 5;
/// Below this, numbers mean something everywhere: inodes, sessions, workers, mounts, flags.
const SMALL: u64 = 12;
/// What else they may be: permissions, lengths, and whatever is beside a limit.
const LARGE: [u64; 16] = [
    0o755,
    0o4755,
    0o100_644,
    1000,
    1001,
    4096,
    65_537,
    1 << 20,
    (1 << 20) + 1,
    1 << 44,
    u32::MAX as u64,
    1 << 32,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];
const TEXTS: [&str; 22] = [
    "",
    "a",
    "a",
    "b",
    "b",
    "c",
    "a/",
    "a/b",
    "/",
    "/m",
    "/n",
    "/m/a",
    "..",
    ".",
    "\0",
    "memory://m",
    "memory://n/p",
    "user.a",
    "system.posix_acl_access",
    "0123456789abcdef",
    "é\u{fffd}",
    "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789\
     0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789\
     01234567890123456789012345678901234567890123456789012345",
];

/// Makes messages of which nothing is known but their types.
struct Arbitrary {
    messages: HashMap<String, DescriptorProto>,
    random: StdRng,
}

impl Arbitrary {
    fn new(seed: u64) -> Self {
        let files = FileDescriptorSet::decode(cavern_proto::FILE_DESCRIPTORS).unwrap().file;
        let mut messages = HashMap::new();
        for file in files {
            for message in &file.message_type {
                let name = format!(".{}.{}", file.package(), message.name());
                for nested in &message.nested_type {
                    messages.insert(format!("{name}.{}", nested.name()), nested.clone());
                }
                messages.insert(name, message.clone());
            }
        }
        Self { messages, random: StdRng::seed_from_u64(seed) }
    }

    fn message(&mut self, name: &str, depth: u32) -> Vec<u8> {
        let descriptor = self.messages.get(name).unwrap_or_else(|| panic!("{name}")).clone();
        let mut bytes = Vec::new();
        let alternatives = |index: usize| {
            let of_it = |field: &&FieldDescriptorProto| field.oneof_index == Some(index as i32);
            descriptor.field.iter().filter(of_it).collect::<Vec<_>>()
        };
        let chosen: Vec<_> = (0..descriptor.oneof_decl.len())
            .filter_map(|index| alternatives(index).choose(&mut self.random).map(|field| field.number()))
            .collect();
        for field in &descriptor.field {
            let is_there = match field.oneof_index {
                Some(_) => chosen.contains(&field.number()),
                None => self.random.random_bool(0.7),
            };
            let times = match field.label() {
                Label::Repeated if depth < DEPTH => self.random.random_range(0..4),
                Label::Repeated => 0,
                _ => 1,
            };
            for _ in 0..if is_there { times } else { 0 } {
                self.field(field, depth, &mut bytes);
            }
        }
        bytes
    }

    fn field(&mut self, field: &FieldDescriptorProto, depth: u32, bytes: &mut Vec<u8>) {
        let tag = field.number() as u32;
        let number = match self.random.random_bool(0.8) {
            true => self.random.random_range(0..SMALL),
            false => *LARGE.choose(&mut self.random).unwrap(),
        };
        let mut delimited = |content: &[u8]| {
            encode_key(tag, WireType::LengthDelimited, bytes);
            encode_varint(content.len() as u64, bytes);
            bytes.extend(content);
        };
        match field.r#type() {
            Type::Message if depth == DEPTH => {}
            Type::Message => delimited(&self.message(field.type_name(), depth + 1)),
            Type::String | Type::Bytes => delimited(TEXTS.choose(&mut self.random).unwrap().as_bytes()),
            Type::Fixed32 | Type::Float | Type::Sfixed32 => {
                encode_key(tag, WireType::ThirtyTwoBit, bytes);
                bytes.extend((number as u32).to_le_bytes());
            }
            Type::Fixed64 | Type::Double | Type::Sfixed64 => {
                encode_key(tag, WireType::SixtyFourBit, bytes);
                bytes.extend(number.to_le_bytes());
            }
            Type::Bool => {
                encode_key(tag, WireType::Varint, bytes);
                encode_varint(u64::from(number == 1), bytes);
            }
            Type::Group => unreachable!("proto3 has none"),
            Type::Enum | Type::Int32 | Type::Int64 | Type::Uint32 | Type::Uint64 | Type::Sint32 | Type::Sint64 => {
                encode_key(tag, WireType::Varint, bytes);
                encode_varint(number, bytes);
            }
        }
    }
}

/// A namespace with a mount of each kind and two workers.
fn beginning() -> Vec<Kind> {
    let worker = |id: u8| {
        let worker = Worker { data_address: format!("h:{id}"), ..Worker::default() };
        Kind::PutWorker(PutWorker { uuid: vec![id; 16].into(), worker: Some(worker), ..PutWorker::default() })
    };
    let mount = |mounts_epoch: u64, path: &str, write_type: WriteType| {
        let (path, uri) = (path.to_owned(), format!("memory:/{path}"));
        let write_type = write_type.into();
        let mount = Mount { path, uri, write_type, block_size: 1 << 20, replicas: 1, ..Mount::default() };
        Kind::AttachMount(AttachMount { mount: Some(mount), mounts_epoch })
    };
    vec![
        Kind::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }),
        worker(1),
        worker(2),
        mount(0, "/m", WriteType::FsMode),
        mount(1, "/n", WriteType::CacheMode),
    ]
}

fn apply_one(database: &Database, command: Command) -> Result<Outcome, StateError> {
    let mut transaction = Transaction::new(database).unwrap();
    let outcome = apply(&mut transaction, command)?;
    let (writes, _) = transaction.finish()?;
    database.write(writes.into_batch(database)).unwrap();
    Ok(outcome)
}

/// Every name leads to an inode of its kind, in a directory that is there.
fn check_names(database: &Database) {
    let tables = Tables::new(database);
    for item in database.raw().iterator_cf(database.family(Family::Dentry), IteratorMode::Start) {
        let (key, _) = item.unwrap();
        let parent = records::leading_id(&key).unwrap();
        let dentry = tables.dentry(parent, &key[8..]).unwrap().unwrap();
        let record = tables.inode(dentry.inode).unwrap().expect("the inode of a name");
        assert_eq!(record.kind, dentry.kind);
        assert!(tables.inode(parent).unwrap().is_some(), "the directory of a name");
    }
}

#[test]
fn whatever_is_in_the_log_is_applied() {
    let rounds = number_from_environment("CAVERN_ARBITRARY_ROUNDS").unwrap_or(ROUNDS);
    let first = number_from_environment("CAVERN_SEED").unwrap_or(0);
    let (mut done, mut refused) = (0, 0);
    for seed in first..first + rounds {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        for kind in beginning() {
            apply_one(&database, Command { command: Some(kind) }).unwrap();
        }
        let mut arbitrary = Arbitrary::new(seed);
        for place in 0..COMMANDS {
            // Most of what there is comes from clients.
            let command = if arbitrary.random.random_bool(0.8) {
                let mutation = arbitrary.message(".cavern.master.v1.Mutation", 0);
                let mut mutation = Mutation::decode(&*mutation).unwrap();
                if arbitrary.random.random_bool(0.9) {
                    mutation.seq = place as u64 + 1;
                }
                let [session, answered] = [1..3, 0..3].map(|range| arbitrary.random.random_range(range));
                let mutate =
                    Mutate { session, answered, now_ns: place as i64, mutation: Some(mutation), ..Mutate::default() };
                Command { command: Some(Kind::Mutate(mutate)) }
            } else {
                Command::decode(&*arbitrary.message(".cavern.record.v1.Command", 0)).unwrap()
            };
            let shown = format!("{command:?}");
            match apply_one(&database, command) {
                Ok(Outcome::Mutated(result, _)) if result.errno == 0 => done += 1,
                // It is too old for them.
                Ok(_) | Err(StateError::UnknownCommand | StateError::NewerFeatureVersion { .. }) => refused += 1,
                Err(error) => panic!("seed {seed}, command {place}: {error}: {shown}"),
            }
        }
        check_names(&database);
    }
    assert!(done > rounds * 10 && refused > rounds * 10, "{done} and {refused}: too few of a kind");
}
