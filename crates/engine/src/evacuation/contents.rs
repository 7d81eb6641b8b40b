//! Contents of a host: the one definition of *empty*.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Contents of a host, as its agent has found them.
///
/// All fields have to be given: a host of which something is not known is not empty, and there is no default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostContents {
    /// Host.
    pub host: String,
    /// QEMU processes, adopted or not.
    pub qemus: Vec<QemuOnHost>,
    /// VMs that have left, and of which pages are still to be served.
    pub pages_to_serve: Vec<String>,
    /// VMs of which a stopped copy is held.
    pub held: Vec<String>,
    /// VMs that are in doubt.
    pub in_doubt: Vec<String>,
    /// Redirections and tunnels that carry connections of VMs, by VM or address.
    pub redirections: Vec<String>,
    /// VMs that are arriving.
    pub arrivals: Vec<String>,
    /// Services of this host on which others rely.
    pub services: HostServices,
    /// Parts that could not be examined, with the reason.
    pub unknown: Vec<String>,
}

/// QEMU process on a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QemuOnHost {
    /// VM; none if the process is not adopted.
    pub vm: Option<String>,
    /// Process id.
    pub pid: u32,
}

/// Services of a host on which others rely.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostServices {
    /// It keeps the ownership registry for others.
    pub witness: bool,
    /// It is a member of the etcd cluster.
    pub etcd_member: bool,
    /// A controller runs on it.
    pub controller: bool,
    /// A DNS server that names of VMs depend on runs on it.
    pub dns: bool,
    /// Storage that it exports to other hosts, by name.
    pub storage_exports: Vec<String>,
}

/// Something that remains on a host, so that it is not empty.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "remains", rename_all = "kebab-case")]
pub enum Remaining {
    /// A part could not be examined.
    Unknown {
        /// The part, with the reason.
        part: String,
    },
    /// QEMU of an adopted VM.
    Vm {
        /// VM.
        vm: String,
    },
    /// QEMU that is not adopted.
    UnadoptedQemu {
        /// Process id.
        pid: u32,
    },
    /// Pages of a VM that has left.
    PagesToServe {
        /// VM.
        vm: String,
    },
    /// A stopped copy of a VM.
    Held {
        /// VM.
        vm: String,
    },
    /// A VM that is in doubt.
    InDoubt {
        /// VM.
        vm: String,
    },
    /// A redirection or tunnel.
    Redirection {
        /// VM or address.
        of: String,
    },
    /// A VM that is arriving.
    Arrival {
        /// VM.
        vm: String,
    },
    /// The ownership registry.
    Witness,
    /// A member of the etcd cluster.
    EtcdMember,
    /// A controller.
    Controller,
    /// A DNS server.
    Dns,
    /// Exported storage.
    StorageExport {
        /// Name.
        storage: String,
    },
}

#[cfg(any(test, feature = "testing"))]
impl HostContents {
    /// Returns the contents of an empty host, of which a test changes what it needs.
    pub fn of_an_empty_host(host: &str) -> Self {
        Self {
            host: host.to_owned(),
            qemus: Vec::new(),
            pages_to_serve: Vec::new(),
            held: Vec::new(),
            in_doubt: Vec::new(),
            redirections: Vec::new(),
            arrivals: Vec::new(),
            services: HostServices {
                witness: false,
                etcd_member: false,
                controller: false,
                dns: false,
                storage_exports: Vec::new(),
            },
            unknown: Vec::new(),
        }
    }
}

impl HostContents {
    /// Returns all that remains. The host is empty if that is nothing; there is no other definition.
    pub fn what_remains(&self) -> Vec<Remaining> {
        let Self {
            host: _,
            qemus,
            pages_to_serve,
            held,
            in_doubt,
            redirections,
            arrivals,
            services,
            unknown,
        } = self;
        let HostServices { witness, etcd_member, controller, dns, storage_exports } = services;
        let owned = |names: &[String], remaining: fn(String) -> Remaining| -> Vec<Remaining> {
            names.iter().cloned().map(remaining).collect()
        };
        let mut remaining = owned(unknown, |part| Remaining::Unknown { part });
        remaining.extend(qemus.iter().map(|qemu| match &qemu.vm {
            Some(vm) => Remaining::Vm { vm: vm.clone() },
            None => Remaining::UnadoptedQemu { pid: qemu.pid },
        }));
        remaining.extend(owned(pages_to_serve, |vm| Remaining::PagesToServe { vm }));
        remaining.extend(owned(held, |vm| Remaining::Held { vm }));
        remaining.extend(owned(in_doubt, |vm| Remaining::InDoubt { vm }));
        remaining.extend(owned(redirections, |of| Remaining::Redirection { of }));
        remaining.extend(owned(arrivals, |vm| Remaining::Arrival { vm }));
        let services = [
            (*witness, Remaining::Witness),
            (*etcd_member, Remaining::EtcdMember),
            (*controller, Remaining::Controller),
            (*dns, Remaining::Dns),
        ];
        remaining.extend(services.into_iter().filter_map(|(is_there, service)| is_there.then_some(service)));
        remaining.extend(owned(storage_exports, |storage| Remaining::StorageExport { storage }));
        remaining
    }

    /// Returns true if nothing remains.
    pub fn is_empty(&self) -> bool {
        self.what_remains().is_empty()
    }
}

impl Remaining {
    /// Returns true if it may end without an operator's help: it is worth while to wait.
    pub fn ends_by_itself(&self) -> bool {
        match self {
            Self::Unknown { .. }
            | Self::Vm { .. }
            | Self::PagesToServe { .. }
            | Self::Held { .. }
            | Self::InDoubt { .. }
            | Self::Redirection { .. }
            | Self::Arrival { .. } => true,
            Self::UnadoptedQemu { .. }
            | Self::Witness
            | Self::EtcdMember
            | Self::Controller
            | Self::Dns
            | Self::StorageExport { .. } => false,
        }
    }

    /// Returns what to do about it.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::Unknown { .. } => "look into the log of its agent",
            Self::Vm { .. } => "move it, or shut it down",
            Self::UnadoptedQemu { .. } => "adopt it with `whimbrel vm adopt`, or end it",
            Self::PagesToServe { .. } => "wait until they have been served",
            Self::Held { .. } | Self::InDoubt { .. } => "decide with `whimbrel recover` which host has it",
            Self::Redirection { .. } => {
                "wait until its connections have ended, or end it with `whimbrel net`"
            }
            Self::Arrival { .. } => "wait until it has arrived, or cancel its migration",
            Self::Witness => "make another host the witness",
            Self::EtcdMember => "move the member to another host",
            Self::Controller => "start the controller on another host",
            Self::Dns => "let another server be the primary of the zones",
            Self::StorageExport { .. } => "move the storage to another host",
        }
    }
}

impl fmt::Display for Remaining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { part } => write!(f, "something that could not be examined: {part}"),
            Self::Vm { vm } => write!(f, "VM {vm}"),
            Self::UnadoptedQemu { pid } => write!(f, "QEMU {pid}, which is not adopted"),
            Self::PagesToServe { vm } => write!(f, "pages of VM {vm}, which has left"),
            Self::Held { vm } => write!(f, "a stopped copy of VM {vm}"),
            Self::InDoubt { vm } => write!(f, "VM {vm}, which is in doubt"),
            Self::Redirection { of } => write!(f, "a redirection of {of}"),
            Self::Arrival { vm } => write!(f, "VM {vm}, which is arriving"),
            Self::Witness => f.write_str("the ownership registry"),
            Self::EtcdMember => f.write_str("a member of the etcd cluster"),
            Self::Controller => f.write_str("a controller"),
            Self::Dns => f.write_str("a DNS server"),
            Self::StorageExport { storage } => write!(f, "storage {storage}, which other hosts use"),
        }
    }
}
