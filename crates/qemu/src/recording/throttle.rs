//! Caps on a guest's writes to the disks that are recorded, enforced by QEMU's own throttling: smooth, and
//! without our code in the path of a write. All disks share one cap.

use serde::Deserialize;
use serde_json::{Value, json};

use super::PREFIX;
use crate::drives::{self, Caps, Drive, Medium};
use crate::qmp::{Qmp, QmpError};

/// Total writes of a guest to some disks since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Number of write requests.
    pub writes: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// A cap on writes; an absent value is not capped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteCap {
    /// Maximum writes per second.
    pub writes_per_s: Option<u64>,
    /// Maximum bytes per second.
    pub bytes_per_s: Option<u64>,
}

/// The devices whose writes are counted and capped.
#[derive(Debug, Default)]
pub(super) struct Throttle {
    /// Ids or QOM paths of the devices that use the recorded disks, one for each; none for one that another client
    /// has throttled.
    devices: Vec<Option<String>>,
    /// Current cap.
    cap: WriteCap,
}

impl Medium {
    /// Returns true if it is in one of our groups, whose caps are ours.
    fn is_capped_by_us(&self) -> bool {
        self.cap_group.as_ref().is_some_and(|group| group.starts_with(PREFIX))
    }

    /// Returns true if no other client has throttled it. A group without a cap belongs to another client, too.
    fn is_free(&self) -> bool {
        self.is_capped_by_us() || self.cap_group.is_none() && self.caps == Caps::default()
    }
}

impl Throttle {
    /// Finds the devices of disks with these top nodes.
    pub(super) fn find<'a>(qmp: &mut Qmp, nodes: impl Iterator<Item = &'a str>) -> Result<Self, QmpError> {
        let drives = drives::query(qmp)?;
        let device_of = |node: &str| {
            let has_it = |it: &&Drive| it.medium.as_ref().is_some_and(|it| it.node == node && it.is_free());
            drives.iter().find(has_it)?.device.clone()
        };
        Ok(Self { devices: nodes.map(device_of).collect(), cap: WriteCap::default() })
    }

    /// Returns true if the disk with this index is capped.
    pub(super) fn is_capped(&self, disk: usize) -> bool {
        self.devices.get(disk).is_some_and(Option::is_some)
    }

    /// Returns the guest's total writes.
    pub(super) fn written(&self, qmp: &mut Qmp) -> Result<Written, QmpError> {
        #[derive(Deserialize)]
        struct DeviceStats {
            qdev: Option<String>,
            stats: Stats,
        }
        #[derive(Deserialize)]
        struct Stats {
            wr_operations: u64,
            wr_bytes: u64,
        }
        let all: Vec<DeviceStats> = qmp.execute("query-blockstats", Value::Null)?;
        let ours = all.iter().filter(|of| of.qdev.is_some() && self.devices.contains(&of.qdev));
        Ok(ours.fold(Written::default(), |sum, of| Written {
            writes: sum.writes + of.stats.wr_operations,
            bytes: sum.bytes + of.stats.wr_bytes,
        }))
    }

    /// Applies this cap.
    pub(super) fn apply(&mut self, qmp: &mut Qmp, cap: WriteCap) -> Result<(), QmpError> {
        if cap == self.cap {
            return Ok(());
        }
        // Another client may have throttled a disk in the meantime: from then on that client owns the caps.
        let drives = drives::query(qmp)?;
        let is_free = |device: &String| {
            let is_it = |drive: &&Drive| drive.device.as_ref() == Some(device);
            drives.iter().find(is_it).and_then(|it| it.medium.as_ref()).is_some_and(Medium::is_free)
        };
        self.devices.iter_mut().for_each(|device| *device = device.take().filter(is_free));
        self.cap = cap;
        set(qmp, self.devices.iter().flatten(), cap)
    }

    /// Lifts the cap, where it is still ours. If QEMU does not report in time whose it is, it is lifted without this
    /// check: QEMU runs the command even if it answers too late.
    pub(super) fn lift(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        if std::mem::take(&mut self.cap) == WriteCap::default() {
            return Ok(());
        }
        match lift_all(qmp) {
            Ok(_) => Ok(()),
            Err(error) if error.is_refusal() => Err(error),
            Err(_) => set(qmp, self.devices.iter().flatten(), WriteCap::default()),
        }
    }
}

/// Caps all devices; the first refusal is the error.
fn set<'a>(qmp: &mut Qmp, devices: impl Iterator<Item = &'a String>, cap: WriteCap) -> Result<(), QmpError> {
    let orders = devices.map(|device| ("block_set_io_throttle", order(device, cap)));
    qmp.execute_all(orders)?.into_iter().try_for_each(|answer| answer.map(drop))
}

/// Lifts every cap of ours, whichever agent set it. Returns true if there was one.
pub(super) fn lift_all(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let drives = drives::query(qmp)?;
    let ours = drives.iter().filter(|drive| drive.medium.as_ref().is_some_and(Medium::is_capped_by_us));
    let devices: Vec<&String> = ours.filter_map(|drive| drive.device.as_ref()).collect();
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
