//! Parsers of QEMU's human-readable output about memory.

use std::collections::BTreeMap;

use super::ListedBlock;

/// A region of guest-physical addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) start: u64,
    pub(super) last: u64,
    /// True if it is RAM, ROM or flash, and not a device's registers or a container.
    pub(super) is_memory: bool,
    /// Name of the region that has the content, also where an alias shows a part of it.
    pub(super) name: String,
    /// Offset of `start` within that region, in bytes.
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

/// Returns the regions of `info mtree` in the address space that CPUs see, with those that others cover, e.g.
/// `0000000100000000-000000017fffffff (prio 0, ram): alias ram-above-4g @pc.ram 0000000080000000-00000000ffffffff`.
/// An alias of a container, as with several NUMA nodes, adds the regions in that.
pub(super) fn regions(tree: &str) -> Vec<Region> {
    let mut sections: BTreeMap<&str, Vec<Listed>> = BTreeMap::new();
    let (mut section, mut in_names) = ("", false);
    for line in tree.lines().map(str::trim) {
        // Address spaces with the same regions have their names in front of them.
        if let Some(name) = line.strip_prefix("address-space: ") {
            if !(in_names && section == CPUS) {
                section = if name == "memory" { CPUS } else { "" };
            }
            in_names = true;
            continue;
        }
        in_names = false;
        if line.is_empty() {
            section = "";
        } else if let Some(name) = line.strip_prefix("memory-region: ") {
            section = name;
        } else if !section.is_empty() {
            sections.entry(section).or_default().extend(listed(line));
        }
    }
    let mut found = Vec::new();
    for listed in sections.get(CPUS).into_iter().flatten() {
        expand(listed, &sections, MAX_ALIASES, &mut found);
    }
    found
}

/// Key of the regions that CPUs see: no region has an empty first word.
const CPUS: &str = " cpus";
/// Maximum number of aliases on the way to a region.
const MAX_ALIASES: u32 = 4;
/// Maximum number of regions. A QEMU has some hundred; one that its guest has taken over may print aliases of aliases
/// without end.
const MAX_REGIONS: usize = 10_000;

/// A line of `info mtree`.
struct Listed {
    region: Region,
    is_alias: bool,
}

/// Adds a region; and those that it shows, if it is the alias of a container.
fn expand(
    listed: &Listed,
    sections: &BTreeMap<&str, Vec<Listed>>,
    max_aliases: u32,
    found: &mut Vec<Region>,
) {
    let shown = &listed.region;
    if found.len() >= MAX_REGIONS {
        return;
    }
    found.push(shown.clone());
    let section = sections.get(shown.name.as_str()).filter(|_| listed.is_alias && max_aliases > 0);
    let Some([container, inner @ ..]) = section.map(Vec::as_slice) else { return };
    for inner in inner {
        if let Some(region) = shown_part(&inner.region, container.region.start, shown) {
            expand(&Listed { region, is_alias: inner.is_alias }, sections, max_aliases - 1, found);
        }
    }
}

/// Returns the part of a region in a container that an alias of the container shows, at its address there.
fn shown_part(inner: &Region, container_start: u64, alias: &Region) -> Option<Region> {
    let begin = inner.start.checked_sub(container_start)?;
    let last = inner.last.checked_sub(container_start)?;
    let shown_last = alias.offset.checked_add(alias.last - alias.start)?;
    let (first, last) = (begin.max(alias.offset), last.min(shown_last));
    let place = |at: u64| alias.start.checked_add(at - alias.offset);
    (first <= last).then_some(())?;
    Some(Region {
        start: place(first)?,
        last: place(last)?,
        offset: inner.offset.checked_add(first - begin)?,
        ..inner.clone()
    })
}

fn listed(line: &str) -> Option<Listed> {
    let (addresses, rest) = line.split_once(" (prio ")?;
    let (start, last) = range(addresses)?;
    let (kind, name) = rest.split_once("): ")?;
    if name.ends_with(" [disabled]") || last < start {
        return None;
    }
    let kind = kind.rsplit_once(", ")?.1;
    let is_memory = ["ram", "rom", "romd"].contains(&kind);
    let alias = name.strip_prefix("alias ").and_then(|alias| alias.rsplit_once(" @"));
    let (name, offset) = match alias {
        Some((_, shown)) => {
            let (name, addresses) = shown.rsplit_once(' ')?;
            (name, range(addresses)?.0)
        }
        None => (name, 0),
    };
    let region = Region { start, last, is_memory, name: name.to_owned(), offset };
    Some(Listed { region, is_alias: alias.is_some() })
}

fn range(addresses: &str) -> Option<(u64, u64)> {
    let (start, last) = addresses.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(last, 16).ok()?))
}

/// Parses region and address in `Host virtual address for 0x100000 (pc.ram) is 0x7f2be7f00000`.
pub(super) fn host_address(reply: &str) -> Option<(&str, u64)> {
    let (place, address) = reply.strip_prefix("Host virtual address for ")?.rsplit_once(") is ")?;
    Some((place.split_once(" (")?.1, hex(address.trim())?))
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
    fn regions_of_the_cpus_are_read() {
        let tree = "address-space: I/O
  0000000000000000-000000000000ffff (prio 0, ram): not.this

address-space: cpu-memory-0
address-space: memory
  0000000000000000-ffffffffffffffff (prio 0, i/o): system
    0000000000000000-000000000fffffff (prio 0, ram): alias ram-below-4g @pc.ram 0000000000000000-000000000fffffff
      00000000000e0000-00000000000fffff (prio 1, rom): alias isa-bios @pc.bios 0000000000020000-000000000003ffff
    00000000000c0000-00000000000c3fff (prio 1, ram): alias pam-ram @pc.ram 00000000000c0000-00000000000c3fff [disabled]
      0000000100000000-0000000107ffffff (prio 0, ram): my dimm

memory-region: pc.ram
  0000000000000000-000000000fffffff (prio 0, ram): pc.ram
";
        let found = regions(tree);
        let memory: Vec<_> = found.iter().filter(|region| region.is_memory).collect();
        assert_eq!((found.len(), memory.len()), (4, 3));
        assert_eq!((memory[0].name.as_str(), memory[0].last, memory[0].offset), ("pc.ram", 0xfff_ffff, 0));
        assert_eq!((memory[1].name.as_str(), memory[1].offset), ("pc.bios", 0x20000));
        assert_eq!((memory[2].name.as_str(), memory[2].start), ("my dimm", 4 << 30));
    }

    #[test]
    fn an_alias_of_a_container_shows_what_is_in_it() {
        let tree = "address-space: memory
  0000000000000000-ffffffffffffffff (prio 0, i/o): system
    0000000000000000-0000000000ffffff (prio 0, ram): alias ram-below-4g @pc.ram 0000000000000000-0000000000ffffff
    0000000100000000-0000000100ffffff (prio 0, ram): alias ram-above-4g @pc.ram 0000000001000000-0000000001ffffff

memory-region: pc.ram
  0000000000000000-0000000001ffffff (prio 0, i/o): pc.ram
    0000000000000000-00000000017fffff (prio 0, ram): near
    0000000001800000-0000000001ffffff (prio 0, ram): far
";
        let region = |name: &str, start, last, offset| Region {
            start,
            last,
            is_memory: true,
            name: name.to_owned(),
            offset,
        };
        let nodes: Vec<_> = regions(tree).into_iter().filter(|region| region.name.ends_with("ar")).collect();
        let expected = [
            region("near", 0, 0xff_ffff, 0),
            region("near", 4 << 30, (4 << 30) + 0x7f_ffff, 0x100_0000),
            region("far", (4 << 30) + 0x80_0000, (4 << 30) + 0xff_ffff, 0),
        ];
        assert_eq!(nodes, expected);
    }

    #[test]
    fn gpa2hva_is_read() {
        let reply = "Host virtual address for 0x100000 (pc.ram) is 0x7f2be7f00000\r\n";
        assert_eq!(host_address(reply), Some(("pc.ram", 0x7f2b_e7f0_0000)));
        assert_eq!(host_address("No memory is mapped at address 0x0"), None);
    }

    proptest::proptest! {
        #[test]
        fn no_printed_text_panics(text in ".{0,300}") {
            let _ = blocks(&text);
            let _ = blocks(&format!("Block Name Total HVA\n{text}"));
            let _ = regions(&format!("address-space: memory\n{text}"));
            let _ = regions(&format!("address-space: memory\n{text}\n\nmemory-region: {text}"));
            let _ = host_address(&text);
        }
    }
}
