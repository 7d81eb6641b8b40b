//! Drives of devices, as QEMU reports them (`query-block`).

use serde::Deserialize;
use serde_json::Value;

use crate::qmp::{Qmp, QmpError};

/// Name of the command.
pub(crate) const QUERY_BLOCK: &str = "query-block";

/// A drive.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Drive {
    /// Name; empty if a device uses a node directly.
    #[serde(rename = "device")]
    pub(crate) name: String,
    /// Id or QOM path of the device that uses the drive.
    #[serde(rename = "qdev")]
    pub(crate) device: Option<String>,
    pub(crate) removable: bool,
    /// Medium in the drive.
    #[serde(rename = "inserted")]
    pub(crate) medium: Option<Medium>,
}

/// Medium in a drive.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Medium {
    /// Name of the top node.
    #[serde(rename = "node-name")]
    pub(crate) node: String,
    /// File name of the medium, with those of the nodes below it if they do not follow from it.
    pub(crate) file: String,
    pub(crate) image: Image,
    #[serde(flatten)]
    pub(crate) caps: Caps,
    /// Group whose members share these caps.
    #[serde(default, rename = "group")]
    pub(crate) cap_group: Option<String>,
}

/// An image, with those below it.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Image {
    /// Length as the device sees it, in bytes.
    #[serde(rename = "virtual-size")]
    pub(crate) bytes: u64,
    actual_size: Option<u64>,
    #[serde(rename = "backing-image")]
    below: Option<Box<Image>>,
}

impl Image {
    /// Returns the space used on the host, with all images below it, in bytes.
    pub(crate) fn used_bytes(&self) -> u64 {
        let own = self.actual_size.unwrap_or(self.bytes);
        let below = self.below.as_ref().map_or(0, |image| image.used_bytes());
        own.saturating_add(below).min(self.bytes)
    }
}

/// Limits on reads and writes per second, in bytes and in requests; 0 means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[allow(clippy::struct_field_names, reason = "QEMU's own names")]
pub(crate) struct Caps {
    bps: u64,
    bps_rd: u64,
    bps_wr: u64,
    iops: u64,
    iops_rd: u64,
    iops_wr: u64,
}

/// Queries all drives.
pub(crate) fn query(qmp: &mut Qmp) -> Result<Vec<Drive>, QmpError> {
    qmp.execute(QUERY_BLOCK, Value::Null)
}

/// Media of all devices at one moment, to check later that they are still the same.
///
/// A snapshot puts another node above the one that a device used, a change of medium replaces it, and a disk that has
/// grown has another length than before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Media(Vec<(DriveName, Option<NodeFileBytes>)>);

/// Name of the top node, file name of the medium, and its length in bytes.
type NodeFileBytes = (String, String, u64);

/// Device, and name of the drive.
type DriveName = (Option<String>, String);

/// Returns the current media of all devices.
pub fn media(qmp: &mut Qmp) -> Result<Media, QmpError> {
    let of = |drive: Drive| {
        let medium = drive.medium.map(|medium| (medium.node, medium.file, medium.image.bytes));
        ((drive.device, drive.name), medium)
    };
    let mut media: Vec<_> = query(qmp)?.into_iter().map(of).collect();
    media.sort_unstable();
    Ok(Media(media))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_qemu_is_read() {
        let text = r#"[{"device": "", "qdev": "/machine/peripheral/d0/virtio-backend", "removable": false, "locked": false,
            "inserted": {"node-name": "top", "ro": false, "drv": "qcow2", "file": "/a", "encrypted": false,
                "bps": 0, "bps_rd": 0, "bps_wr": 5, "iops": 0, "iops_rd": 0, "iops_wr": 0, "group": "g",
                "image": {"virtual-size": 100, "actual-size": 70, "filename": "/a", "format": "qcow2",
                    "backing-image": {"virtual-size": 90, "actual-size": 60, "filename": "/b", "format": "raw"}}}},
            {"device": "cd", "qdev": "/machine/unattached/device[9]", "removable": true, "locked": false}]"#;
        let drives: Vec<Drive> = serde_json::from_str(text).unwrap();
        let medium = drives[0].medium.as_ref().unwrap();
        assert_eq!((medium.image.bytes, medium.image.used_bytes()), (100, 100));
        assert_eq!(medium.caps, Caps { bps_wr: 5, ..Caps::default() });
        assert_eq!(medium.cap_group.as_deref(), Some("g"));
        assert!(drives[1].removable && drives[1].medium.is_none());
    }
}
