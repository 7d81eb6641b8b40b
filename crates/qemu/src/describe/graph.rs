//! The block graph of a running QEMU.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::drives::{self, Drive};
use crate::qmp::{Qmp, QmpError};

/// A block node.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Node {
    #[serde(rename = "node-name")]
    pub(super) name: String,
    #[serde(rename = "drv")]
    pub(super) driver: String,
    /// Name of the file, or a `json:` description where a name does not suffice.
    pub(super) file: String,
    #[serde(rename = "ro")]
    pub(super) read_only: bool,
    #[serde(default)]
    pub(super) encrypted: bool,
    pub(super) cache: Cache,
    #[serde(default, rename = "detect_zeroes")]
    pub(super) detect_zeroes: String,
    #[serde(default)]
    pub(super) image: NodeImage,
    #[serde(default, rename = "dirty-bitmaps")]
    pub(super) bitmaps: Vec<Named>,
    #[serde(skip)]
    pub(super) children: BTreeMap<String, String>,
}

/// Data in an image beside its current content.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct NodeImage {
    #[serde(default)]
    pub(super) snapshots: Vec<Named>,
    /// Length of the data that the node provides to the node above it, in bytes.
    #[serde(default, rename = "virtual-size")]
    pub(super) bytes: Option<u64>,
}

/// An item with a name, which may be empty.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Named {
    #[serde(default)]
    pub(super) name: String,
}

/// Cache options of a node.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Cache {
    pub(super) direct: bool,
    #[serde(rename = "no-flush")]
    pub(super) no_flush: bool,
}

/// A drive as a device sees it.
#[derive(Debug, Clone)]
pub(super) struct Backend {
    /// Name of the drive; empty where a device uses a node directly.
    pub(super) name: String,
    /// QOM path of the device that uses it.
    pub(super) device: Option<String>,
    pub(super) removable: bool,
    /// Name of its top node; `None` when it is empty.
    pub(super) root: Option<String>,
    /// Length as the device sees it.
    pub(super) bytes: Option<u64>,
    /// Space used on the host, with all images below it, in bytes.
    pub(super) used_bytes: Option<u64>,
}

impl Node {
    /// Returns the offset of a node of the raw driver in the node below it, from its `json:`
    /// description.
    pub(super) fn offset_bytes(&self) -> Option<u64> {
        let Some(described) = self.file.strip_prefix("json:") else {
            // Only values that differ from the default need a description: neither offset nor size
            // does here.
            return None;
        };
        let described: Value = serde_json::from_slice(described.as_bytes()).ok()?;
        match &described["offset"] {
            Value::Null => Some(0),
            Value::String(text) => text.parse().ok(),
            number => number.as_u64(),
        }
    }
}

/// Queries all nodes, the children of each, and the devices' view of them.
pub(super) fn query(qmp: &mut Qmp) -> Result<(BTreeMap<String, Node>, Vec<Backend>), QmpError> {
    #[derive(Deserialize)]
    struct Graph {
        nodes: Vec<GraphNode>,
        edges: Vec<Edge>,
    }
    #[derive(Deserialize)]
    struct GraphNode {
        id: u64,
        name: String,
        #[serde(rename = "type")]
        kind: String,
    }
    #[derive(Deserialize)]
    struct Edge {
        parent: u64,
        child: u64,
        name: String,
    }
    let nodes: Vec<Node> = qmp.execute("query-named-block-nodes", json!({ "flat": true }))?;
    let mut nodes: BTreeMap<String, Node> = nodes.into_iter().map(|node| (node.name.clone(), node)).collect();
    let graph: Graph = qmp.execute("x-debug-query-block-graph", Value::Null)?;
    let driver_name = |id| {
        let is_it = |node: &&GraphNode| node.id == id && node.kind == "block-driver";
        graph.nodes.iter().find(is_it).map(|node| node.name.clone())
    };
    for edge in &graph.edges {
        if let (Some(parent), Some(child)) = (driver_name(edge.parent), driver_name(edge.child))
            && let Some(node) = nodes.get_mut(&parent)
        {
            node.children.insert(edge.name.clone(), child);
        }
    }
    let backend = |drive: Drive| Backend {
        name: drive.name,
        device: drive.device,
        removable: drive.removable,
        bytes: drive.medium.as_ref().map(|medium| medium.image.bytes),
        used_bytes: drive.medium.as_ref().map(|medium| medium.image.used_bytes()),
        root: drive.medium.map(|medium| medium.node),
    };
    let backends = drives::query(qmp)?.into_iter().map(backend).collect();
    Ok((nodes, backends))
}
