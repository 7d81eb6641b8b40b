//! Memory: its kind may change, the names of its RAM blocks may not.
//!
//! Both hosts identify a RAM block by its name. The machine defines the name of its default memory
//! (`pc.ram`); a memory object's name is its id (or, in machine types before 4.0, its path
//! `/objects/ID`): an object of that id in place of the default memory is the same block.

use super::{CommandBuilder, RamPlan};
use crate::cmdline::QemuOption;
use crate::describe::Problem;
use crate::options::Value;

/// Size of a normal page in bytes.
const PAGE_BYTES: u64 = 4096;

/// Objects that can be created on the destination.
const SUPPORTED_OBJECTS: &[&str] = &[
    "iothread",
    "main-loop",
    "throttle-group",
    "can-bus",
    "rng-random",
    "rng-builtin",
    "rng-egd",
    "secret",
    "secret_keyring",
    "tls-creds-x509",
    "tls-creds-psk",
    "tls-creds-anon",
    "tls-cipher-suites",
    "authz-simple",
    "authz-list",
    "authz-list-file",
    "authz-pam",
    "filter-buffer",
    "filter-dump",
    "filter-mirror",
    "filter-redirector",
    "filter-replay",
    "filter-rewriter",
    "thread-context",
    "cryptodev-backend-builtin",
    "acpi-generic-initiator",
];

impl CommandBuilder<'_> {
    /// Translates `-object`.
    pub(super) fn object(&mut self, option: &QemuOption) -> Option<QemuOption> {
        let mut value = option.parse_value();
        let kind = value.get("qom-type").unwrap_or_default();
        let id = value.get("id").unwrap_or_default();
        if kind.starts_with("memory-backend-") {
            if self.is_unused(&id) {
                self.warnings.push(Problem::new(
                    "memory-unused",
                    format!(
                        "memory {id} belongs to no device: the guest does not see it, and the destination \
                         will not have it"
                    ),
                    format!("remove it (object-del {id}), or add it at the destination after the migration"),
                ));
                return None;
            }
            self.memory_object(&kind, &id, &mut value);
            return Some(QemuOption::new("object", value.to_string()));
        }
        if !SUPPORTED_OBJECTS.contains(&kind.as_str()) && !self.rules.allows(&format!("object:{kind}")) {
            self.problem(
                "object-refused",
                format!("object {id} ({kind}) may belong to this host or keep state outside QEMU"),
                format!("start the guest without it, or allow it by name (object:{kind})"),
            );
        }
        Some(self.rewrite_paths(option))
    }

    /// Returns true if no device uses a memory object. Only with a device does the object's block get a name, which
    /// is the object's name or its path, after the device's path where the device is on a bus (virtio-mem).
    fn is_unused(&self, id: &str) -> bool {
        let at_a_device = format!("/{id}");
        let blocks = &self.vm.memory.blocks;
        let is_its = |name: &str| name == id || name.ends_with(&at_a_device);
        !blocks.is_empty() && blocks.iter().all(|block| !is_its(&block.name))
    }

    fn memory_object(&mut self, kind: &str, id: &str, value: &mut Value) {
        if value.get("pmem").as_deref() == Some("on") || kind == "memory-backend-epc" {
            self.problem(
                "memory-persistent",
                format!("memory {id} is persistent memory or belongs to an enclave"),
                "such memory cannot be migrated",
            );
            return;
        }
        let target = match self.rules.ram {
            RamPlan::Memfd { .. } => "memory-backend-memfd",
            RamPlan::Anonymous => "memory-backend-ram",
        };
        self.warn_unbound(id, value);
        // The size and the properties that the guest can notice stay; the origin of the memory does not.
        for key in [
            "mem-path",
            "align",
            "discard-data",
            "readonly",
            "rom",
            "offset",
            "host-nodes",
            "policy",
            "hugetlb",
            "hugetlbsize",
            "seal",
            "share",
            "x-use-canonical-path-for-ramblock-id",
            "prealloc-context",
        ] {
            value.remove(key);
        }
        value.set("qom-type", target);
        self.apply_plan(id, value);
    }

    /// Adds a warning for memory that is bound to NUMA nodes of the source host. The nodes of the two hosts differ, so
    /// the binding is dropped, and a user may miss it.
    fn warn_unbound(&mut self, id: &str, value: &Value) {
        let is_default = |key: &&str| match value {
            // For an object that was added later QEMU lists the nodes even if there are none.
            Value::Json(map)
                if map.get(*key).and_then(|nodes| nodes.as_array()).is_some_and(Vec::is_empty) =>
            {
                true
            }
            _ => *key == "policy" && value.get(key).as_deref() == Some("default"),
        };
        let left_out: Vec<_> = ["host-nodes", "policy", "prealloc-context"]
            .into_iter()
            .filter(|key| value.has(key) && !is_default(key))
            .collect();
        if !left_out.is_empty() {
            self.warnings.push(Problem::new(
                "memory-unbound",
                format!(
                    "memory {id} is bound to NUMA nodes of the source host ({}), and will not be bound on \
                     the destination",
                    left_out.join(", ")
                ),
                "if NUMA placement matters, move its pages after the migration (migratepages), or start the \
                 destination's agent under numactl",
            ));
        }
    }

    /// Returns the size of the huge pages for a block. Only blocks that had huge pages get them (one NUMA node may have
    /// them and another not), of the size that they had.
    fn hugepage_bytes(&self, id: &str, planned: u64) -> Option<u64> {
        let path = format!("/objects/{id}");
        let mut blocks = self.vm.memory.blocks.iter();
        let own = blocks.find(|block| block.name == id || block.name == path);
        own.map_or(Some(planned), |block| Some(block.page_size_bytes).filter(|bytes| *bytes > PAGE_BYTES))
    }

    /// Adds the plan's properties to a memory object.
    fn apply_plan(&self, id: &str, value: &mut Value) {
        if let RamPlan::Memfd { hugepage_bytes } = self.rules.ram {
            value.set_json("share", true.into());
            if let Some(size) = hugepage_bytes.and_then(|size| self.hugepage_bytes(id, size)) {
                value.set_json("hugetlb", true.into());
                value.set_json("hugetlbsize", size.into());
            }
        }
        let path = format!("/objects/{id}");
        let canonical = self.vm.memory.blocks.iter().any(|block| block.name == path);
        value.set_json("x-use-canonical-path-for-ramblock-id", canonical.into());
    }

    /// Replaces the machine's default memory with an object, if the plan requires one.
    pub(super) fn memory(&mut self) {
        if !matches!(self.rules.ram, RamPlan::Memfd { .. }) || self.has_objects() {
            return;
        }
        let Some(id) = self.vm.memory.default_block.clone() else { return };
        let mut value = Value::parse("memory-backend-memfd", Some("qom-type"));
        value.set("id", &id);
        value.set("size", &format!("{}b", self.vm.memory.base_bytes));
        self.apply_plan(&id, &mut value);
        if let Some(machine) = self.out.iter_mut().find(|option| option.name == "machine") {
            let mut of_machine = machine.parse_value();
            // Settings of -machine for the default memory move to the object.
            for (key, of_object) in [("mem-merge", "merge"), ("dump-guest-core", "dump")] {
                if let Some(given) = of_machine.get(key) {
                    value.set(of_object, &given);
                }
            }
            of_machine.set("memory-backend", &id);
            machine.value = Some(of_machine.to_string());
        }
        self.out.insert(0, QemuOption::new("object", value.to_string()));
    }

    /// Returns true if objects already provide the machine's memory.
    fn has_objects(&self) -> bool {
        self.vm.options.iter().any(|option| match option.name.as_str() {
            "machine" => option.parse_value().get("memory-backend").is_some(),
            "numa" => option.value.as_deref().is_some_and(|text| text.contains("memdev=")),
            _ => false,
        })
    }
}
