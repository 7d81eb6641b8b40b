//! Files and addresses of its host that a guest needs, and the destination's view of them.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::identity::FileIdentity;
use super::input::DestinationFile;
use super::open_files::{MismatchedFile, OpenFiles};
use crate::cmdline::QemuOption;
use crate::command::HostRules;
use crate::describe::{Disk, FILE_OPTIONS, VmDescription, is_file_key};

/// Names for this host in addresses of network disks.
const LOCAL_NAMES: &[&str] = &["localhost", "ip6-localhost", "localhost.localdomain", "0.0.0.0", "::", "::1"];

/// A file or address that the guest needs of its host, as the source sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeededFile {
    /// Path on the source, or address of a network disk.
    pub path: String,
    /// Identity; `None` if it cannot be determined.
    pub identity: Option<FileIdentity>,
    /// Creation time of the inode, in nanoseconds since 1970; `None` if the file system does not record it. Inode
    /// numbers are reused, and the time distinguishes a later file from an earlier one.
    #[serde(default)]
    pub created_unix_ns: Option<u64>,
    /// Option that names it, if it only has to exist (a kernel, a key, firmware); none for a disk, which must be the
    /// same on both hosts.
    pub option: Option<String>,
    /// True if it is opened past the page cache.
    pub direct: bool,
    /// True if QEMU locks it.
    pub locked: bool,
}

/// Returns the files that a guest needs, and those addresses of its disks that refer to this host.
pub fn needed_files(vm: &VmDescription) -> Vec<NeededFile> {
    let mut files: Vec<NeededFile> = Vec::new();
    // A file that a disk has, too, must be the same on both hosts, so firmware comes second.
    let (firmware, disks): (Vec<_>, Vec<_>) = vm.disks.iter().partition(|disk| disk.is_firmware());
    for disk in disks.into_iter().chain(firmware) {
        for name in names_of(disk) {
            for place in locations(name) {
                let (path, identity) = match place {
                    ImageLocation::File(path) => (path.clone(), FileIdentity::of(Path::new(&path))),
                    ImageLocation::HostLocal(address) => (address, None),
                };
                if files.iter().all(|file| file.path != path) {
                    let locked = !is_unlocked(vm, &path);
                    let created_unix_ns =
                        std::fs::metadata(&path).ok().and_then(|meta| created_unix_ns(&meta));
                    // Its content arrives as memory, like that of a firmware of `-bios`.
                    let option = disk.is_firmware().then(|| "the firmware's flash (pflash)".to_owned());
                    let direct = disk.direct;
                    files.push(NeededFile { path, identity, created_unix_ns, option, direct, locked });
                }
            }
        }
    }
    for (option, path) in vm.options.iter().flat_map(other_files) {
        if files.iter().all(|file| file.path != path) {
            let (identity, created_unix_ns, option) = (None, None, Some(option));
            files.push(NeededFile { path, identity, created_unix_ns, option, direct: true, locked: true });
        }
    }
    files
}

/// Returns the creation time of a regular file's inode, in nanoseconds since 1970; `None` if it is not recorded.
pub fn created_unix_ns(meta: &std::fs::Metadata) -> Option<u64> {
    if !meta.is_file() {
        return None;
    }
    let since_1970 = meta.created().ok()?.duration_since(std::time::UNIX_EPOCH).ok()?;
    u64::try_from(since_1970.as_nanos()).ok()
}

/// Returns the names of all images that hold a disk's content.
fn names_of(disk: &Disk) -> impl Iterator<Item = &String> {
    disk.file.iter().chain(&disk.backing_files).chain(&disk.data_files)
}

/// Returns the paths of a guest's images that do not lead to the files that its QEMU has open. QEMU keeps the file
/// that it opened, whatever its name is now, and a program that opens the path gets another one. `open` are QEMU's
/// open files.
pub fn files_not_open(vm: &VmDescription, open: &OpenFiles) -> Vec<MismatchedFile> {
    let mut found: Vec<MismatchedFile> = Vec::new();
    for disk in &vm.disks {
        for place in names_of(disk).flat_map(|name| locations(name)) {
            let ImageLocation::File(path) = place else { continue };
            if found.iter().any(|stray| stray.path == path) || open.has(Path::new(&path)) {
                continue;
            }
            let is_there = Path::new(&path).exists();
            found.push(MismatchedFile { disk: disk.name.clone(), path, is_there });
        }
    }
    found
}

fn is_unlocked(vm: &VmDescription, path: &str) -> bool {
    vm.options.iter().filter(|option| option.name == "drive" || option.name == "blockdev").any(|option| {
        let value = option.parse_value();
        let off = ["locking", "file.locking"].iter().any(|key| value.get(key).as_deref() == Some("off"));
        let names = ["file", "filename", "file.filename"];
        off && names.iter().any(|key| value.get(key).as_deref() == Some(path))
    })
}

/// Returns files that an option names and that are neither disks nor created anew at the destination (sockets, logs,
/// RAM): keys and certificates, firmware, tables. Without them QEMU would not start there.
fn other_files(option: &QemuOption) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut take = |what: String, path: &str| {
        if path.starts_with('/') {
            found.push((what, path.to_owned()));
        }
    };
    let name = option.name.as_str();
    match name {
        "drive" | "blockdev" | "chardev" | "netdev" | "nic" | "net" => {}
        _ if name == "bios" || FILE_OPTIONS.contains(&name) => {
            take(format!("-{name}"), option.value.as_deref().unwrap_or_default());
        }
        _ => {
            let mut value = option.parse_value();
            let kind = value.get("qom-type").or_else(|| value.get("driver"));
            let what = kind.map_or(format!("-{name}"), |kind| format!("-{name} {kind}"));
            value.map_texts(&mut |key, text| {
                let made_anew = key.ends_with("mem-path") || (name == "spice" && key == "addr");
                if is_file_key(name, key) && !made_anew {
                    let several = (name, key) == ("acpitable", "data");
                    text.split(|letter| several && letter == ':').for_each(|path| take(what.clone(), path));
                }
                None
            });
        }
    }
    found
}

/// Location of a disk.
#[derive(Debug, PartialEq, Eq)]
enum ImageLocation {
    File(String),
    /// An address that refers to a different host on every host.
    HostLocal(String),
}

/// Returns the locations that an image's name stands for, as far as they belong to this host.
fn locations(name: &str) -> Vec<ImageLocation> {
    if let Some(description) = name.strip_prefix("json:") {
        let mut found = Vec::new();
        if let Ok(description) = serde_json::from_slice(description.as_bytes()) {
            collect_locations(&description, name, &mut found);
        }
        return found;
    }
    let plain = ["file:", "host_device:", "host_cdrom:"].iter().find_map(|start| name.strip_prefix(start));
    let plain = plain.unwrap_or(name);
    if plain.starts_with('/') {
        return vec![ImageLocation::File(plain.to_owned())];
    }
    if is_of_this_host(name) { vec![ImageLocation::HostLocal(name.to_owned())] } else { Vec::new() }
}

/// Collects the locations in a `json:` description.
fn collect_locations(json: &Json, name: &str, found: &mut Vec<ImageLocation>) {
    match json {
        Json::Object(map) => {
            for (key, value) in map {
                let last = key.rsplit('.').next().unwrap_or(key);
                match (last, value.as_str()) {
                    ("filename" | "file", Some(text)) => found.extend(locations(text)),
                    ("host", Some(host)) if is_local_name(host) => {
                        found.push(ImageLocation::HostLocal(name.to_owned()));
                    }
                    ("path", Some(path)) if path.starts_with('/') && map_is_socket(map) => {
                        found.push(ImageLocation::HostLocal(name.to_owned()));
                    }
                    _ => collect_locations(value, name, found),
                }
            }
        }
        Json::Array(list) => list.iter().for_each(|value| collect_locations(value, name, found)),
        _ => {}
    }
}

/// Returns true if a description's socket is a unix one, or if the whole is flat (`server.path`).
fn map_is_socket(map: &serde_json::Map<String, Json>) -> bool {
    let kind = map.get("type").or_else(|| map.get("server.type")).and_then(Json::as_str);
    kind == Some("unix") || map.contains_key("server.path") || map.get("driver").is_some_and(|d| d == "nbd")
}

fn is_of_this_host(name: &str) -> bool {
    if let Some((scheme, rest)) = name.split_once("://") {
        if scheme.ends_with("+unix") || scheme == "nvme" {
            return true;
        }
        let authority = rest.split(['/', '?']).next().unwrap_or_default();
        let address = authority.rsplit_once('@').map_or(authority, |(_, address)| address);
        return is_local_name(host_of(address));
    }
    // The old syntax, which allows no other scheme.
    name.strip_prefix("nbd:").is_some_and(|rest| rest.starts_with("unix:") || is_local_name(host_of(rest)))
}

/// Returns the host in `host:port` or `[address]:port`.
fn host_of(address: &str) -> &str {
    match address.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => address.split(':').next().unwrap_or_default(),
    }
}

fn is_local_name(host: &str) -> bool {
    host.starts_with("127.") || LOCAL_NAMES.iter().any(|name| host.eq_ignore_ascii_case(name))
}

/// Returns the destination's view of the files that a guest needs. `shared` are directories, files and addresses of
/// the source that a user has declared to be the same on both hosts.
pub fn inspect_files(files: &[NeededFile], rules: &HostRules, shared: &[String]) -> Vec<DestinationFile> {
    let see = |file: &NeededFile| {
        let is_path = file.path.starts_with('/');
        let there = if is_path { rules.local_path(&file.path) } else { file.path.clone() };
        let is_marked =
            |word: &String| *word == file.path || (is_path && Path::new(&file.path).starts_with(word));
        DestinationFile {
            path: file.path.clone(),
            source: file.identity.clone(),
            exists: !is_path || Path::new(&there).exists(),
            destination: FileIdentity::of(Path::new(&there)),
            path_there: there,
            option: file.option.clone(),
            marked_shared: shared.iter().any(is_marked),
            direct: file.direct,
            locked: file.locked,
        }
    };
    files.iter().map(see).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_mean_this_host() {
        for name in [
            "nbd://localhost:10809/x",
            "nbd://127.0.0.1",
            "nbd://[::1]:10809/x",
            "nbd+unix:///x?socket=/run/x",
            "nbd:localhost:10809",
            "nbd:127.0.1.1:10809:exportname=x",
            "nbd:unix:/run/x:exportname=y",
            "ssh://me@localhost/x",
            "iscsi://LOCALHOST:3260/iqn/0",
            "nvme://0000:01:00.0/1",
            r#"json:{"driver":"raw","file":{"driver":"nbd","server":{"type":"inet","host":"::1","port":"1"}}}"#,
            r#"json:{"driver":"nbd","server.type":"unix","server.path":"/run/x"}"#,
            r#"json:{"driver":"nbd","server":{"type":"unix","path":"/run/x"}}"#,
        ] {
            assert_eq!(locations(name), [ImageLocation::HostLocal(name.to_owned())]);
        }
        for name in [
            "nbd://storage:10809/x",
            "nbd://10.0.0.1/localhost",
            "nbd:storage:10809",
            "rbd:pool/image",
            "https://example.org/localhost.iso",
            r#"json:{"driver":"nbd","server":{"type":"inet","host":"storage","port":"1"}}"#,
            "json:{",
            "",
        ] {
            assert_eq!(locations(name), []);
        }
    }

    #[test]
    fn files_under_other_names() {
        let file =
            |name: &str| assert_eq!(locations(name), [ImageLocation::File("/dev/vg/a".to_owned())], "{name}");
        file("/dev/vg/a");
        file("host_device:/dev/vg/a");
        file(r#"json:{"driver":"raw","offset":512,"file":{"driver":"host_device","filename":"/dev/vg/a"}}"#);
    }

    #[test]
    fn all_files_that_an_option_names() {
        let found = |name: &str, value: &str| {
            let found = other_files(&QemuOption::new(name, value.to_owned()));
            found.into_iter().map(|(option, path)| format!("{option} {path}")).collect::<Vec<_>>()
        };
        assert_eq!(found("kernel", "/boot/vmlinuz"), ["-kernel /boot/vmlinuz"]);
        assert_eq!(found("bios", "/usr/share/OVMF.fd"), ["-bios /usr/share/OVMF.fd"]);
        assert_eq!(found("bios", "bios.bin"), [""; 0]);
        let key = "/var/lib/libvirt/qemu/domain-1-web1/master-key.aes";
        let secret = format!("secret,id=masterKey0,format=raw,file={key}");
        assert_eq!(found("object", &secret), [format!("-object secret {key}")]);
        let json = format!(r#"{{"qom-type":"secret","id":"masterKey0","format":"raw","file":"{key}"}}"#);
        assert_eq!(found("object", &json), [format!("-object secret {key}")]);
        assert_eq!(
            found("object", "tls-creds-x509,id=t,dir=/etc/pki,endpoint=server"),
            ["-object tls-creds-x509 /etc/pki"]
        );
        assert_eq!(found("fw_cfg", "name=opt/x,file=/srv/x.ign"), ["-fw_cfg /srv/x.ign"]);
        assert_eq!(found("fw_cfg", "name=opt/x,string=/srv/x.ign"), [""; 0]);
        assert_eq!(found("acpitable", "data=/a:/b"), ["-acpitable /a", "-acpitable /b"]);
        assert_eq!(found("device", "e1000,romfile=/x.rom"), ["-device e1000 /x.rom"]);
        assert_eq!(found("device", "e1000,romfile=x.rom"), [""; 0]);
        // The destination has others of its own for these.
        assert_eq!(found("object", "memory-backend-file,id=m,size=1G,mem-path=/dev/hugepages"), [""; 0]);
        assert_eq!(found("chardev", "socket,id=c,path=/run/x"), [""; 0]);
        assert_eq!(found("drive", "file=/x"), [""; 0]);
    }
}
