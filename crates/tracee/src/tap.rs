//! Taps: network devices of which a process is the far end.
//!
//! A frame that is written to a tap's descriptor enters the host as if it came from the process, and a frame that the
//! host sends on the device waits behind the descriptor until it is read. A duplicate of another process's descriptor
//! names the same queue.

use std::fs::OpenOptions;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use linux_raw_sys::ioctl as requests;
use nix::libc;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::{Process, ProcessError, abi};

/// Device whose descriptors are taps.
const TUN_DEVICE: &str = "/dev/net/tun";

/// Offloads that every reader of these taps has: checksums may be missing. TCP's segments are divided by the kernel: a
/// frame that is not divided yet cannot be sent on a tap whose guest has no such offload.
const OFFLOADS: libc::c_uint = libc::TUN_F_CSUM;

/// One descriptor of a tap: a queue of frames in each direction.
#[derive(Debug)]
pub struct Tap {
    interface: String,
    has_header: bool,
    descriptor: OwnedFd,
}

impl Tap {
    /// Duplicates the descriptors of taps that a process has; returns each with its number in that process.
    ///
    /// For as long as a duplicate is open, the kernel takes the device for one that is in use.
    pub fn of_process(process: &Process) -> Result<Vec<(i32, Self)>, ProcessError> {
        let mut found = Vec::new();
        for (number, target) in process.descriptors()? {
            if !is_tap(&target) {
                continue;
            }
            let duplicate = pidfd_getfd(process, number, PidfdGetfdFlags::empty())
                .map_err(|error| process.explain("duplicate a descriptor of", error.into()))?;
            // A descriptor that is not attached to a device yet is no tap.
            if let Ok(tap) = Self::attached(duplicate) {
                found.push((number, tap));
            }
        }
        process.check_alive()?;
        Ok(found)
    }

    /// Opens the tap with this name, and makes it if there is none; a device that is made here ends with the last
    /// descriptor. Its frames have a header of `header_bytes` bytes: checksums may be missing, but segments are
    /// divided. If that is zero, frames have no header, and lack nothing.
    pub fn open(interface: &str, header_bytes: i32) -> io::Result<Self> {
        let descriptor = OwnedFd::from(
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(TUN_DEVICE)?,
        );
        let mut request = named(interface)?;
        let header_flag = if header_bytes == 0 { 0 } else { libc::IFF_VNET_HDR };
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | header_flag;
        request.ifr_ifru.ifru_flags = flags as libc::c_short;
        // SAFETY: the structure of this request, without pointers.
        unsafe { abi::ioctl(&descriptor, requests::TUNSETIFF, &mut request) }?;
        if header_bytes == 0 {
            return Self::attached(descriptor);
        }
        let mut size: libc::c_int = header_bytes;
        // SAFETY: the argument of this request is an int.
        unsafe { abi::ioctl(&descriptor, requests::TUNSETVNETHDRSZ, &mut size) }?;
        let request = libc::c_ulong::from(requests::TUNSETOFFLOAD);
        // SAFETY: the argument of this request is a set of flags, no pointer.
        if unsafe { libc::ioctl(descriptor.as_raw_fd(), request, libc::c_ulong::from(OFFLOADS)) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Self::attached(descriptor)
    }

    fn attached(descriptor: OwnedFd) -> io::Result<Self> {
        let mut request = named("")?;
        // SAFETY: the structure of this request, without pointers.
        unsafe { abi::ioctl(&descriptor, requests::TUNGETIFF, &mut request) }?;
        let name = request.ifr_name.iter().map(|letter| *letter as u8).take_while(|letter| *letter != 0);
        let interface = String::from_utf8_lossy(&name.collect::<Vec<_>>()).into_owned();
        // SAFETY: the kernel has just filled in this field.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        let has_header = libc::c_int::from(flags) & libc::IFF_VNET_HDR != 0;
        Ok(Self { interface, has_header, descriptor })
    }

    /// Returns the name of the device, in the network namespace in which it was made.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Returns the bytes that precede each frame at present. The process may change them at any time: a virtio device
    /// has others before its state is loaded than after it.
    pub fn header_bytes(&self) -> io::Result<usize> {
        if !self.has_header {
            return Ok(0);
        }
        let mut bytes: libc::c_int = 0;
        // SAFETY: the argument of this request is an int.
        unsafe { abi::ioctl(&self.descriptor, requests::TUNGETVNETHDRSZ, &mut bytes) }?;
        Ok(usize::try_from(bytes).unwrap_or(0))
    }

    /// Sends a whole frame into the host, as if the process sent it.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        let header = vec![0; self.header_bytes()?];
        let sent = rustix::io::writev(&self.descriptor, &[IoSlice::new(&header), IoSlice::new(frame)])?;
        if sent == header.len() + frame.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Takes the next frame that waits for the process, with its header; returns its length, or none if none waits.
    pub fn take(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        // The descriptor may be one that blocks.
        if self.is_empty()? {
            return Ok(None);
        }
        match retry_on_intr(|| rustix::io::read(&self.descriptor, &mut *into)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns true if no frame waits for the process.
    pub fn is_empty(&self) -> io::Result<bool> {
        let mut waits = [PollFd::new(&self.descriptor, PollFlags::IN)];
        Ok(retry_on_intr(|| poll(&mut waits, Some(&Timespec::default())))? == 0)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Returns true for the targets of links in `/proc/PID/fd` that can be taps: those of the tun driver, and macvtaps.
fn is_tap(target: &Path) -> bool {
    let Some(target) = target.to_str() else { return false };
    let number = target.strip_prefix("/dev/tap");
    target == TUN_DEVICE || number.is_some_and(|digits| digits.bytes().all(|digit| digit.is_ascii_digit()))
}

/// Returns the request about the device with this name.
fn named(interface: &str) -> io::Result<libc::ifreq> {
    // SAFETY: a plain structure, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero.
    if interface.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (letter, byte) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *letter = byte as libc::c_char;
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_taps_are_taken_for_taps() {
        for (target, is) in [
            ("/dev/net/tun", true),
            ("/dev/tap7", true),
            ("/dev/tape", false),
            ("/dev/net/tun0", false),
            ("socket:[7]", false),
            ("/dev/kvm", false),
        ] {
            assert_eq!(is_tap(Path::new(target)), is, "{target}");
        }
    }

    #[test]
    fn names_that_the_kernel_cannot_have_are_refused() {
        assert!(named("fifteen-letters").is_ok());
        assert_eq!(named("sixteen--letters").unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
