//! Chains of block nodes: the files and images below a node.

use std::collections::BTreeSet;

use super::FilePart;
use super::graph::Node;
use super::live::LiveState;

impl LiveState {
    /// Returns the file behind a node: that of the lowest file node under it, because formats with
    /// options report a whole `json:` description as their name.
    pub(super) fn file_of(&self, node: &Node) -> String {
        let mut at = node;
        for _ in 0..self.nodes.len() {
            if !at.file.starts_with("json:") {
                return at.file.clone();
            }
            match at.children.get("file").and_then(|child| self.nodes.get(child)) {
                Some(child) => at = child,
                None => break,
            }
        }
        node.file.clone()
    }

    /// Returns all nodes below a node, itself included.
    pub(super) fn below(&self, top: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let mut open = vec![top.to_owned()];
        while let Some(name) = open.pop() {
            if let Some(node) = self.nodes.get(&name)
                && found.insert(name)
            {
                open.extend(node.children.values().cloned());
            }
        }
        found
    }

    /// Returns the external data files of the image that a node is, or of the images below it.
    pub(super) fn data_files(&self, image: &Node) -> Vec<String> {
        let nodes = image.children.get("data-file").and_then(|name| self.nodes.get(name));
        nodes.into_iter().map(|node| self.file_of(node)).collect()
    }

    /// Returns the part of the file that an image occupies; `None` if it is the whole file. Only QEMU's raw driver cuts
    /// a part out, and the result is then shorter than the node below it.
    pub(super) fn part(&self, image: &Node) -> Option<FilePart> {
        let mut at = image;
        for _ in 0..self.nodes.len() {
            let below = self.nodes.get(at.children.get("file")?)?;
            if at.driver == "raw" && at.image.bytes < below.image.bytes {
                let offset_bytes = (at.name == image.name).then(|| at.offset_bytes()).flatten();
                return Some(FilePart { offset_bytes });
            }
            at = below;
        }
        None
    }

    /// Returns the nodes of a chain from `top` down, through `file` of filters and `backing` of
    /// images.
    pub(super) fn chain(&self, top: &str) -> Vec<&Node> {
        let mut chain: Vec<&Node> = Vec::new();
        let mut next = self.nodes.get(top);
        while let Some(node) = next.filter(|node| !chain.iter().any(|seen| seen.name == node.name)) {
            chain.push(node);
            let below = node.children.get("backing").or_else(|| node.children.get("file"));
            next = below.and_then(|name| self.nodes.get(name));
        }
        chain
    }
}
