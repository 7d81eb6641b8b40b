//! Parsers of QEMU's human-readable output about memory.

use super::ListedBlock;

/// A range of guest-physical memory that a RAM block backs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GuestRange {
    pub(super) start: u64,
    pub(super) last: u64,
    pub(super) name: String,
    /// Offset of `start` within the block, in bytes.
    pub(super) offset: u64,
}

/// Parses the table of `x-query-ramblock`:
///
/// ```text
///   Block Name    PSize              Offset               Used              Total                HVA  RO
///       pc.ram    4 KiB  0x0000000000000000 0x0000000008000000 0x0000000008000000 0x00007faa43e00000  rw
/// ```
pub(super) fn blocks(table: &str) -> Result<Vec<ListedBlock>, String> {
    let mut lines = table.lines();
    let header = lines.next().unwrap_or_default();
    if !header.contains("Block Name") || !header.contains("Total") {
        return Err(format!("unknown header {header:?}"));
    }
    let after_total = header.split_whitespace().skip_while(|word| *word != "Total").skip(1);
    let extra: Vec<&str> = after_total.collect();
    let mut listed = lines
        .filter(|line| !line.trim().is_empty())
        .map(|line| block(line, &extra).ok_or_else(|| format!("unknown line {line:?}")))
        .collect::<Result<Vec<_>, _>>()?;
    // A memory object that no device uses has a block without a name, which no guest sees and no migration sends.
    listed.retain(|block| !block.name.is_empty());
    if listed.is_empty() { Err("it is empty".to_owned()) } else { Ok(listed) }
}

fn block(line: &str, extra: &[&str]) -> Option<ListedBlock> {
    let mut words: Vec<&str> = line.split_whitespace().collect();
    let mut host_address = None;
    for column in extra.iter().rev() {
        let word = words.pop()?;
        if *column == "HVA" {
            host_address = Some(hex(word)?);
        }
    }
    let max_bytes = hex(words.pop()?)?;
    let used_bytes = hex(words.pop()?)?;
    let offset = hex(words.pop()?)?;
    let unit: u64 = match words.pop()? {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    let count: u64 = words.pop()?.parse().ok()?;
    let name = words.join(" ");
    (used_bytes <= max_bytes).then_some(ListedBlock {
        name,
        page_size_bytes: count.checked_mul(unit)?,
        offset,
        used_bytes,
        max_bytes,
        host_address,
    })
}

/// Returns the parts of `info mtree -f` that the CPUs see and that are RAM or ROM, e.g. `
/// 0000000000100000-000000000fffffff (prio 0, ram): pc.ram @0000000000100000 KVM`.
pub(super) fn guest_ranges(tree: &str) -> Vec<GuestRange> {
    let mut found = Vec::new();
    let mut in_memory = false;
    for line in tree.lines() {
        if line.starts_with("FlatView") {
            in_memory = false;
        } else if line.trim_start().starts_with("AS \"memory\"") {
            in_memory = true;
        } else if in_memory {
            found.extend(guest_range(line));
        }
    }
    found
}

fn guest_range(line: &str) -> Option<GuestRange> {
    let (addresses, rest) = line.trim_start().split_once(" (prio ")?;
    let (start, last) = addresses.split_once('-')?;
    let (kind, rest) = rest.split_once("): ")?;
    let kind = kind.rsplit_once(", ")?.1;
    if kind != "ram" && kind != "rom" {
        return None;
    }
    let (name, offset) = match rest.split_once(" @") {
        Some((name, offset)) => (name, u64::from_str_radix(offset.split_whitespace().next()?, 16).ok()?),
        None => (rest.trim_end().trim_end_matches(" KVM"), 0),
    };
    let start = u64::from_str_radix(start, 16).ok()?;
    let last = u64::from_str_radix(last, 16).ok()?;
    // Ranges smaller than a page have no page of their own to compare.
    (last >= start && last - start >= 0xfff).then(|| GuestRange {
        start,
        last,
        name: name.to_owned(),
        offset,
    })
}

/// Parses the address in `Host virtual address for 0x100000 (pc.ram) is 0x7f2be7f00000`.
pub(super) fn host_address(reply: &str) -> Option<u64> {
    hex(reply.strip_prefix("Host virtual address for")?.rsplit_once(" is ")?.1.trim())
}

fn hex(word: &str) -> Option<u64> {
    u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str =
        "              Block Name    PSize              Offset               Used              Total
                  pc.ram    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000
    /rom@etc/acpi/tables    4 KiB  0x0000000011140000 0x0000000000020000 0x0000000000200000
";
    const NEW: &str = "  Block Name    PSize              Offset               Used              Total                HVA  RO
         my ram    2 MiB  0x0000000000000000 0x0000000010000000 0x0000000010000000 0x00007faa43e00000  rw
";

    #[test]
    fn both_tables_are_read() {
        let old = blocks(OLD).unwrap();
        assert_eq!(old.len(), 2);
        assert_eq!(old[1].name, "/rom@etc/acpi/tables");
        assert_eq!((old[1].used_bytes, old[1].max_bytes), (0x20000, 0x20_0000));
        assert_eq!(old[0].host_address, None);
        let new = blocks(NEW).unwrap();
        assert_eq!(new[0].name, "my ram");
        assert_eq!(new[0].page_size_bytes, 2 << 20);
        assert_eq!(new[0].host_address, Some(0x7faa_43e0_0000));
    }

    #[test]
    fn blocks_without_a_name_are_omitted() {
        let unused =
            "                            4 KiB  0x0000000004000000 0x0000000004000000 0x0000000004000000\n";
        let listed = blocks(&format!("{OLD}{unused}")).unwrap();
        assert_eq!(listed, blocks(OLD).unwrap());
    }

    #[test]
    fn unparsable_tables_are_errors() {
        assert!(blocks("").is_err());
        assert!(blocks(OLD.lines().next().unwrap()).is_err());
        assert!(blocks(&OLD.replace("0x0000000000200000", "much")).is_err());
        assert!(blocks(&OLD.replace("KiB", "pages")).is_err());
        // More bytes are in use than exist.
        assert!(blocks(&OLD.replace("0x0000000000200000", "0x0000000000000200")).is_err());
    }

    #[test]
    fn the_cpus_view_is_read() {
        let tree = "FlatView #0
 AS \"I/O\", root: io
 Root memory region: io
  0000000000000000-0000000000000fff (prio 0, ram): not.this

FlatView #1
 AS \"memory\", root: system
 AS \"cpu-memory-0\", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): pc.ram KVM
  00000000000e0000-00000000000fffff (prio 1, rom): pc.bios @0000000000020000
  0000000000100000-000000000fffffff (prio 0, ram): pc.ram @0000000000100000 KVM
  00000000fec00000-00000000fec00fff (prio 0, i/o): ioapic
";
        let ranges = guest_ranges(tree);
        assert_eq!(ranges.len(), 3);
        assert_eq!((ranges[0].name.as_str(), ranges[0].offset), ("pc.ram", 0));
        assert_eq!((ranges[1].name.as_str(), ranges[1].offset), ("pc.bios", 0x20000));
        assert_eq!((ranges[2].start, ranges[2].last, ranges[2].offset), (0x10_0000, 0xfff_ffff, 0x10_0000));
    }

    #[test]
    fn gpa2hva_is_read() {
        let reply = "Host virtual address for 0x100000 (pc.ram) is 0x7f2be7f00000\r\n";
        assert_eq!(host_address(reply), Some(0x7f2b_e7f0_0000));
        assert_eq!(host_address("No memory is mapped at address 0x0"), None);
    }

    proptest::proptest! {
        #[test]
        fn no_printed_text_panics(text in ".{0,300}") {
            let _ = blocks(&text);
            let _ = blocks(&format!("Block Name Total HVA\n{text}"));
            let _ = guest_ranges(&format!("AS \"memory\"\n{text}"));
            let _ = host_address(&text);
        }
    }
}
