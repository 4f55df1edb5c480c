//! The blocks of `docs/hosts.md`.

use std::fs;
use std::path::Path;

/// What the guide has between two fences.
#[derive(Debug, Default)]
pub struct Block {
    /// Empty for one that says nothing.
    pub hosts: Vec<String>,
    /// The file whose content it is; without one, the block is commands.
    pub file: Option<String>,
    pub append: bool,
    pub text: String,
}

#[derive(Debug, Default)]
pub struct Section {
    pub title: String,
    pub blocks: Vec<Block>,
}

#[derive(Debug)]
pub struct Guide {
    pub sections: Vec<Section>,
}

impl Guide {
    pub fn read() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/hosts.md");
        let text = fs::read_to_string(path).unwrap();
        let mut sections = vec![Section::default()];
        let mut open: Option<Block> = None;
        for line in text.lines() {
            match (&mut open, line.strip_prefix("```")) {
                (None, Some(info)) => open = Some(Block::described(info)),
                (Some(_), Some(_)) => sections.last_mut().unwrap().blocks.extend(open.take()),
                (Some(block), None) => block.text.push_str(&format!("{line}\n")),
                (None, None) => {
                    if let Some(title) = line.strip_prefix("## ") {
                        sections.push(Section { title: title.to_owned(), blocks: vec![] });
                    }
                }
            }
        }
        assert!(open.is_none(), "a block of the guide has no end");
        Self { sections }
    }

    /// Whether a section is another one, or comes behind it.
    pub fn is_beyond(&self, title: &str, other: &str) -> bool {
        let position = |title: &str| self.sections.iter().position(|section| section.title == title).unwrap();
        position(title) >= position(other)
    }
}

impl Block {
    /// `sh on=node1,node2`, `toml on=all file=/etc/cavern/cluster.toml`.
    fn described(info: &str) -> Self {
        let mut block = Self::default();
        for word in info.split_whitespace().skip(1) {
            match word.split_once('=') {
                Some(("on", hosts)) => block.hosts = hosts.split(',').map(str::to_owned).collect(),
                Some(("file", path)) => block.file = Some(path.to_owned()),
                None if word == "append" => block.append = true,
                _ => panic!("`{word}` of a block of the guide means nothing"),
            }
        }
        block
    }
}
