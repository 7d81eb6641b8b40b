//! Packet sockets: the frames that pass a network device, and frames that are sent on it (packet(7)).

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, SystemTime};

use linux_raw_sys::if_packet as raw;
use nix::libc;

/// Bytes of the header that precedes each frame that is [sent](PacketSocket::send): `struct virtio_net_hdr`.
pub const VIRTIO_HEADER_BYTES: usize = 10;

/// One instruction of a socket's filter, a classic BPF program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilterStep {
    /// Operation.
    pub code: u16,
    /// Number of instructions to skip if the condition of a jump holds.
    pub if_true: u8,
    /// Number of instructions to skip if it does not.
    pub if_false: u8,
    /// Operand.
    pub operand: u32,
}

/// A frame that passed the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes of it in the buffer.
    pub bytes: usize,
    /// True if the host sent it on the device; false if it came in from the device.
    pub is_outgoing: bool,
    /// Tag control information of the VLAN tag that the kernel has taken off.
    pub vlan: Option<u16>,
    /// Time at which it passed, by the kernel.
    pub at: Option<SystemTime>,
}

/// Socket on one network device.
#[derive(Debug)]
pub struct PacketSocket {
    socket: OwnedFd,
}

impl PacketSocket {
    /// Opens a socket that receives the frames that pass a device in either direction and that `filter` accepts.
    pub fn listen(interface: &str, filter: &[FilterStep]) -> io::Result<Self> {
        let this = Self::open()?;
        // Before it is bound to a protocol it receives nothing, so that no frame passes unfiltered.
        this.attach(filter)?;
        this.set(libc::SOL_PACKET, raw::PACKET_AUXDATA as libc::c_int, 1)?;
        this.set(libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
        this.bind(interface, libc::ETH_P_ALL as u16)?;
        Ok(this)
    }

    /// Opens a socket that receives nothing, and sends frames on a device that bear `mark`, past its queueing
    /// disciplines. Rules of netfilter at the device's egress apply to them, and can know them by the mark.
    pub fn sender(interface: &str, mark: u32) -> io::Result<Self> {
        let this = Self::open()?;
        this.set(libc::SOL_PACKET, raw::PACKET_VNET_HDR as libc::c_int, 1)?;
        this.set(libc::SOL_PACKET, raw::PACKET_QDISC_BYPASS as libc::c_int, 1)?;
        this.set(libc::SOL_SOCKET, libc::SO_MARK, mark as libc::c_int)?;
        this.bind(interface, 0)?;
        Ok(this)
    }

    fn open() -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: the arguments are numbers.
        let socket = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just created this descriptor, and no other code knows it.
        Ok(Self { socket: unsafe { OwnedFd::from_raw_fd(socket) } })
    }

    fn set(&self, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
        // SAFETY: all options that are set by this function are ints.
        unsafe { self.set_option(level, name, &value) }
    }

    /// # Safety
    /// `T` must be the type of this option, and every pointer in it valid.
    unsafe fn set_option<T>(&self, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
        let (value, bytes) = (std::ptr::from_ref(value).cast(), size_of::<T>() as libc::socklen_t);
        // SAFETY: the kernel reads `bytes` bytes of a value that outlives the call; the caller guarantees the rest.
        let result = unsafe { libc::setsockopt(self.socket.as_raw_fd(), level, name, value, bytes) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn attach(&self, filter: &[FilterStep]) -> io::Result<()> {
        let step = |step: &FilterStep| libc::sock_filter {
            code: step.code,
            jt: step.if_true,
            jf: step.if_false,
            k: step.operand,
        };
        let mut steps: Vec<_> = filter.iter().map(step).collect();
        let len = libc::c_ushort::try_from(steps.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let program = libc::sock_fprog { len, filter: steps.as_mut_ptr() };
        // SAFETY: the type of this option; its pointer is to `len` instructions that outlive the call. The kernel
        // checks the program before it accepts it.
        unsafe { self.set_option(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program) }
    }

    fn bind(&self, interface: &str, protocol: u16) -> io::Result<()> {
        let index = nix::net::if_::if_nametoindex(interface)?;
        // SAFETY: a plain structure, for which zeros are valid.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol.to_be();
        address.sll_ifindex = index as libc::c_int;
        let bytes = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the kernel reads `bytes` bytes of an address that outlives the call.
        let result =
            unsafe { libc::bind(self.socket.as_raw_fd(), std::ptr::from_ref(&address).cast(), bytes) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Receives the next frame that has passed, cut to the length of the buffer; none if there is none.
    pub fn receive(&self, into: &mut [u8]) -> io::Result<Option<Received>> {
        // SAFETY: a plain structure, for which zeros are valid.
        let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut control = [0_u64; 16];
        let mut piece = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        // SAFETY: as above.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_name = std::ptr::from_mut(&mut from).cast();
        message.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        message.msg_iov = &raw mut piece;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        let fd = self.socket.as_raw_fd();
        // SAFETY: all buffers of the message outlive the call, and have the lengths that it names.
        let bytes = unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) };
        let Ok(bytes) = usize::try_from(bytes) else {
            return match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                error => Err(error),
            };
        };
        let is_outgoing = u32::from(from.sll_pkttype) == raw::PACKET_OUTGOING;
        let mut received = Received { bytes, is_outgoing, vlan: None, at: None };
        // SAFETY: the kernel has filled in the message, whose control buffer is still there.
        let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        // SAFETY: the pointer is null, or to a header that the kernel has written, aligned as the buffer is.
        while let Some(header) = unsafe { next.as_ref() } {
            // SAFETY: the header's data follows it.
            let data = unsafe { libc::CMSG_DATA(next) };
            match (header.cmsg_level, header.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) => {
                    // SAFETY: the data of this kind is a `timespec`.
                    let at = unsafe { data.cast::<libc::timespec>().read_unaligned() };
                    let since = Duration::new(at.tv_sec as u64, at.tv_nsec as u32);
                    received.at = SystemTime::UNIX_EPOCH.checked_add(since);
                }
                (libc::SOL_PACKET, kind) if kind == raw::PACKET_AUXDATA as libc::c_int => {
                    // SAFETY: the data of this kind is a `tpacket_auxdata`.
                    let auxiliary = unsafe { data.cast::<raw::tpacket_auxdata>().read_unaligned() };
                    let has_vlan = auxiliary.tp_status & libc::TP_STATUS_VLAN_VALID != 0;
                    received.vlan = has_vlan.then_some(auxiliary.tp_vlan_tci);
                }
                _ => {}
            }
            // SAFETY: as for the first header; the kernel's lengths stay within the control buffer.
            next = unsafe { libc::CMSG_NXTHDR(&raw const message, next) };
        }
        Ok(Some(received))
    }

    /// Sends a whole frame on the device. `header` says what is missing in it: checksums, the division into segments.
    ///
    /// # Errors
    /// `ENOBUFS` if the device's queue is full: the frame can be sent again a little later. Also if the frame is to be
    /// divided and the device cannot do that: then it can never be sent. `EMSGSIZE` if it is longer than the device
    /// allows.
    pub fn send(&self, header: [u8; VIRTIO_HEADER_BYTES], frame: &[u8]) -> io::Result<()> {
        let sent = rustix::io::writev(&self.socket, &[IoSlice::new(&header), IoSlice::new(frame)])?;
        if sent == header.len() + frame.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
