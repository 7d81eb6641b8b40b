//! Disks whose driver in the guest waits for an interrupt that will not arrive.
//!
//! A virtio driver names in `used_event` the answer after which it needs an interrupt (virtio 1.1, section 2.6.7). If
//! QEMU has sent that answer but no interrupt, nothing happens any more: the driver waits, and QEMU has nothing to
//! answer. A QEMU that emulates one processor can get into this state, with or without a migration.

use std::thread;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::cmdline::QemuOption;
use crate::options;
use crate::qmp::{Qmp, QmpError};

/// Time for which a queue must be unchanged to count as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(1);

/// Progress of one queue of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Queue {
    /// QOM path of the device.
    device: String,
    number: u64,
    entries: u64,
    /// Requests that QEMU is processing.
    in_flight: u64,
    /// Answers that QEMU has sent, modulo 2^16.
    used: u16,
    /// Answers after which the driver needs an interrupt, modulo 2^16.
    used_event: u16,
}

#[derive(Deserialize)]
struct VirtioDevice {
    path: String,
    name: String,
}

#[derive(Deserialize)]
struct QueueStatus {
    inuse: u64,
    #[serde(rename = "vring-num")]
    entries: u64,
    #[serde(rename = "vring-avail")]
    avail: u64,
    #[serde(rename = "used-idx")]
    used: u16,
}

impl Queue {
    /// Returns true if the driver needs an interrupt and got none, as far as one sample shows.
    fn is_seemingly_stuck(&self) -> bool {
        let unseen = u64::from(self.used.wrapping_sub(self.used_event));
        self.in_flight == 0 && (1..=self.entries).contains(&unseen)
    }
}

/// Returns queues of disks for which a guest waits for ever, as human-readable text; none if this QEMU cannot report
/// it. Needs a second if there may be one.
///
/// # Errors
/// If the monitor fails.
pub fn find_stuck(qmp: &mut Qmp) -> Result<Vec<String>, QmpError> {
    let mut seem_stuck = disk_queues(qmp)?;
    seem_stuck.retain(Queue::is_seemingly_stuck);
    if seem_stuck.is_empty() {
        return Ok(Vec::new());
    }
    thread::sleep(STUCK_AFTER);
    let later = disk_queues(qmp)?;
    let still = seem_stuck.iter().filter(|queue| later.contains(queue));
    Ok(still.map(|queue| format!("queue {} of {}", queue.number, queue.device)).collect())
}

fn disk_queues(qmp: &mut Qmp) -> Result<Vec<Queue>, QmpError> {
    let devices: Vec<VirtioDevice> = match qmp.execute("x-query-virtio", Value::Null) {
        // QEMU before 7.2 does not know the command.
        Err(error) if error.is_refusal() => return Ok(Vec::new()),
        devices => devices?,
    };
    let mut found = Vec::new();
    for device in devices {
        // Other drivers leave `used_event` unchanged while they do not need interrupts.
        let first = match device.name.as_str() {
            "virtio-blk" => 0,
            // Its disk queues follow those for control and for events.
            "virtio-scsi" => 2,
            _ => continue,
        };
        let status: Value = match qmp.execute("x-query-virtio-status", json!({ "path": device.path })) {
            // The device was unplugged since.
            Err(error) if error.is_refusal() => continue,
            status => status?,
        };
        let has_events = status["guest-features"].to_string().contains("VIRTIO_RING_F_EVENT_IDX");
        if !has_events || status["vhost-started"] == true {
            continue;
        }
        for number in first..status["num-vqs"].as_u64().unwrap_or(0) {
            found.extend(queue(qmp, &device.path, number)?);
        }
    }
    Ok(found)
}

/// Queries a queue that the driver has set up.
fn queue(qmp: &mut Qmp, path: &str, number: u64) -> Result<Option<Queue>, QmpError> {
    let arguments = json!({ "path": path, "queue": number });
    let status: QueueStatus = match qmp.execute("x-query-virtio-queue-status", arguments) {
        Err(error) if error.is_refusal() => return Ok(None),
        status => status?,
    };
    if status.avail == 0 {
        return Ok(None);
    }
    // The field follows flags, index and the entries of the ring of available requests.
    let at = status.avail + 4 + 2 * status.entries;
    let printed = qmp.hmp(&format!("xp /1hx {at:#x}"))?;
    Ok(half_word(&printed).map(|used_event| Queue {
        device: path.trim_end_matches("/virtio-backend").to_owned(),
        number,
        entries: status.entries,
        in_flight: status.inuse,
        used: status.used,
        used_event,
    }))
}

/// Parses the number that `xp /1hx` prints after the address.
fn half_word(printed: &str) -> Option<u16> {
    let (_, word) = printed.trim().rsplit_once(": ")?;
    u16::from_str_radix(word.trim().strip_prefix("0x")?, 16).ok()
}

/// Returns true if an emulated guest's locked instructions are no barriers for QEMU's other threads: if there can
/// be only one processor, or all run in one thread.
pub fn can_become_stuck(accelerator: &str, options: &[QemuOption]) -> bool {
    let of = |name: &'static str| {
        options.iter().filter(move |option| option.name == name).map(QemuOption::parse_value)
    };
    let is_single = |value: options::Value| value.get("thread").as_deref() == Some("single");
    let has_icount = options.iter().any(|option| option.name == "icount");
    accelerator == "tcg" && (possible_processors(of("smp")) < 2 || has_icount || of("accel").any(is_single))
}

/// Returns the maximum number of processors, from the last `-smp`.
fn possible_processors(smp: impl Iterator<Item = options::Value>) -> u64 {
    let Some(smp) = smp.last() else { return 1 };
    let number = |key: &str| smp.get(key).and_then(|text| text.parse::<u64>().ok());
    let topology = ["drawers", "books", "sockets", "dies", "clusters", "modules", "cores", "threads"];
    let product = topology.iter().filter_map(|key| number(key)).product::<u64>();
    number("maxcpus").unwrap_or(0).max(number("cpus").unwrap_or(0)).max(product)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stuck_queues_are_distinguished_from_idle_ones() {
        let queue = |in_flight, used: u16, used_event: u16| Queue {
            device: "/machine/peripheral/d".to_owned(),
            number: 0,
            entries: 256,
            in_flight,
            used,
            used_event,
        };
        for (in_flight, used, used_event, is_stuck) in [
            (0, 7, 7, false),
            (0, 8, 7, true),
            (1, 8, 7, false),
            (0, 7 + 256, 7, true),
            (0, 7 + 257, 7, false),
            // Both counters wrap around.
            (0, 3, 65_530, true),
            (0, 7, 8, false),
        ] {
            assert_eq!(
                queue(in_flight, used, used_event).is_seemingly_stuck(),
                is_stuck,
                "{used} {used_event}"
            );
        }
        assert_eq!(half_word("0000000007d1a204: 0x1f0a\r\n"), Some(0x1f0a));
        assert_eq!(half_word("Cannot access memory"), None);
    }

    #[test]
    fn emulated_guests_on_one_thread_can_become_stuck() {
        let may = |words: &str| {
            let words: Vec<_> = words.split_whitespace().map(str::to_owned).collect();
            can_become_stuck("tcg", &crate::cmdline::parse(&words))
        };
        for one in
            ["", "-smp 1", "-smp cpus=1,maxcpus=1", "-smp 4 -accel tcg,thread=single", "-smp 2 -icount 3"]
        {
            assert!(may(one), "{one}");
        }
        for more in ["-smp 2", "-smp 1,maxcpus=2", "-smp sockets=1,cores=2,threads=1", "-smp 1 -smp 2"] {
            assert!(!may(more), "{more}");
        }
        assert!(!can_become_stuck("kvm", &[]));
    }
}
