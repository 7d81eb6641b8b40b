//! Caps on what a guest may write to the disks that are recorded, kept by QEMU's own throttling: smooth, and with
//! nothing of ours in the way of a write. All of them share one cap.

use serde::Deserialize;
use serde_json::{Value, json};

use super::PREFIX;
use crate::qmp::{Qmp, QmpError};

/// What a guest has written to some disks since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Write requests.
    pub writes: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A cap on writes; what is absent is not capped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteCap {
    /// Writes a second.
    pub writes_per_s: Option<u64>,
    /// Bytes a second.
    pub bytes_per_s: Option<u64>,
}

/// The devices whose writes are counted and capped.
#[derive(Debug, Default)]
pub(super) struct Throttle {
    /// Ids or QOM paths of devices that have recorded disks, but for those that somebody else has throttled.
    devices: Vec<String>,
    /// What is kept now.
    cap: WriteCap,
}

/// A device's drive, from `query-block`.
#[derive(Deserialize)]
struct Backend {
    qdev: Option<String>,
    inserted: Option<Inserted>,
}

#[derive(Deserialize)]
struct Inserted {
    #[serde(rename = "node-name")]
    node: String,
    bps: u64,
    bps_rd: u64,
    bps_wr: u64,
    iops: u64,
    iops_rd: u64,
    iops_wr: u64,
    #[serde(default)]
    group: Option<String>,
}

impl Inserted {
    /// Whether it is in a group of ours, in which caps are ours.
    fn is_ours(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.starts_with(PREFIX))
    }

    /// Whether nobody else has throttled it. A group without a cap is somebody's, too.
    fn is_free(&self) -> bool {
        let caps = [self.bps, self.bps_rd, self.bps_wr, self.iops, self.iops_rd, self.iops_wr];
        self.is_ours() || self.group.is_none() && caps.iter().all(|cap| *cap == 0)
    }
}

impl Throttle {
    /// Finds the devices of disks with these top nodes.
    pub(super) fn find<'a>(qmp: &mut Qmp, nodes: impl Iterator<Item = &'a str>) -> Result<Self, QmpError> {
        let backends: Vec<Backend> = qmp.execute("query-block", Value::Null)?;
        let device_of = |node: &str| {
            let has_it =
                |it: &&Backend| it.inserted.as_ref().is_some_and(|it| it.node == node && it.is_free());
            backends.iter().find(has_it)?.qdev.clone()
        };
        Ok(Self { devices: nodes.filter_map(device_of).collect(), cap: WriteCap::default() })
    }

    /// What the guest has written so far.
    pub(super) fn written(&self, qmp: &mut Qmp) -> Result<Written, QmpError> {
        #[derive(Deserialize)]
        struct Of {
            qdev: Option<String>,
            stats: Stats,
        }
        #[derive(Deserialize)]
        struct Stats {
            wr_operations: u64,
            wr_bytes: u64,
        }
        let all: Vec<Of> = qmp.execute("query-blockstats", Value::Null)?;
        let ours = all.iter().filter(|of| of.qdev.as_ref().is_some_and(|qdev| self.devices.contains(qdev)));
        Ok(ours.fold(Written::default(), |sum, of| Written {
            writes: sum.writes + of.stats.wr_operations,
            bytes: sum.bytes + of.stats.wr_bytes,
        }))
    }

    /// Keeps this cap from now on.
    pub(super) fn keep(&mut self, qmp: &mut Qmp, cap: WriteCap) -> Result<(), QmpError> {
        if cap == self.cap {
            return Ok(());
        }
        // Somebody may have throttled one meanwhile: it is his from then on.
        let backends: Vec<Backend> = qmp.execute("query-block", Value::Null)?;
        let is_free = |device: &String| {
            let is_it = |backend: &&Backend| backend.qdev.as_ref() == Some(device);
            backends.iter().find(is_it).and_then(|it| it.inserted.as_ref()).is_some_and(Inserted::is_free)
        };
        self.devices.retain(is_free);
        self.cap = cap;
        set(qmp, self.devices.iter(), cap)
    }

    /// Lifts the cap without asking first: QEMU does it, even where it answers too late.
    pub(super) fn lift(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        if std::mem::take(&mut self.cap) == WriteCap::default() {
            return Ok(());
        }
        set(qmp, self.devices.iter(), WriteCap::default())
    }
}

/// Caps all of them; the first refusal is the error.
fn set<'a>(qmp: &mut Qmp, devices: impl Iterator<Item = &'a String>, cap: WriteCap) -> Result<(), QmpError> {
    let orders = devices.map(|device| ("block_set_io_throttle", order(device, cap)));
    qmp.execute_all(orders)?.into_iter().try_for_each(|answer| answer.map(drop))
}

/// Lifts every cap of ours, whoever set it. Returns whether there was one.
pub(super) fn lift_all(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let backends: Vec<Backend> = qmp.execute("query-block", Value::Null)?;
    let ours = backends.iter().filter(|backend| backend.inserted.as_ref().is_some_and(Inserted::is_ours));
    let devices: Vec<&String> = ours.filter_map(|backend| backend.qdev.as_ref()).collect();
    set(qmp, devices.iter().copied(), WriteCap::default())?;
    Ok(!devices.is_empty())
}

fn order(device: &str, cap: WriteCap) -> Value {
    json!({
        "id": device,
        "group": format!("{PREFIX}writes"),
        "bps": 0,
        "bps_rd": 0,
        "bps_wr": cap.bytes_per_s.unwrap_or(0),
        "iops": 0,
        "iops_rd": 0,
        "iops_wr": cap.writes_per_s.unwrap_or(0),
    })
}
