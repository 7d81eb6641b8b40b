//! Files of disks, as a running QEMU has them open.

use std::fs;
use std::path::Path;

use serde_json::json;
use whimbrel_qemu::describe::{Disk, FilePart, describe};
use whimbrel_qemu::find::{Selector, find};
use whimbrel_qemu::preflight::files::{files_not_open, needed_files};
use whimbrel_qemu::preflight::{Severity, check_source, gather};
use whimbrel_qemu::ram::ram_blocks;

use crate::support::{Vm, args, qcow2, versions};

fn disks(vm: &mut Vm) -> Vec<Disk> {
    let process = find(&Selector::Pid(vm.pid())).unwrap();
    describe(&mut vm.qmp, &process.start_command()).unwrap().disks
}

fn raw(path: &Path, bytes: u64) {
    fs::File::create(path).unwrap().set_len(bytes).unwrap();
}

/// A part of a file, at the start, in the middle and below a format; a whole file.
#[test]
fn a_disk_that_is_a_part_of_a_file_is_known() {
    for version in versions() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        raw(&path("large"), 16 << 20);
        qcow2(&path("in.qcow2"), "1M");
        let mut inner = fs::read(path("in.qcow2")).unwrap();
        inner.resize(inner.len().next_multiple_of(512), 0);
        let mut outer = vec![0; 1 << 20];
        outer.extend(inner.iter().copied().chain([0; 4096]));
        fs::write(path("outer"), outer).unwrap();
        let mut vm = version.start(
            dir.path(),
            "parts",
            &args(&format!(
                "-machine q35 -m 64 -nodefaults
                 -blockdev driver=raw,node-name=middle,offset=1048576,size=2097152,file.driver=file,file.filename={0}/large,file.locking=off
                 -blockdev driver=raw,node-name=head,size=4194304,read-only=on,file.driver=file,file.filename={0}/large,file.locking=off
                 -blockdev driver=raw,node-name=whole,read-only=on,file.driver=file,file.filename={0}/large,file.locking=off
                 -blockdev driver=qcow2,node-name=inner,read-only=on,file.driver=raw,file.offset=1048576,file.size={1},file.file.driver=file,file.file.filename={0}/outer
                 -device virtio-blk-pci,drive=middle -device virtio-blk-pci,drive=head -device virtio-blk-pci,drive=whole
                 -device virtio-blk-pci,drive=inner",
                dir.path().display(),
                inner.len()
            )),
        );
        let parts: Vec<_> = disks(&mut vm).into_iter().map(|disk| (disk.name, disk.part)).collect();
        let at = |offset_bytes| Some(FilePart { offset_bytes });
        let expected =
            [("middle", at(Some(1 << 20))), ("head", at(Some(0))), ("whole", None), ("inner", at(None))];
        for (name, part) in expected {
            assert!(parts.contains(&(name.to_owned(), part)), "{} {name}: {parts:?}", version.name);
        }
    }
}

/// All files of an image are needed; one that was replaced, deleted or renamed is not mistaken for the open one.
#[test]
fn files_are_identified_by_open_descriptors() {
    for version in versions() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let image = path("split.qcow2");
        let options = format!("data_file={},data_file_raw=on", path("split.data").display());
        let made = std::process::Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-o", &options])
            .arg(&image)
            .arg("1M")
            .status();
        assert!(made.unwrap().success());
        raw(&path("base.raw"), 1 << 20);
        raw(&path("cd.iso"), 1 << 20);
        let mut vm = version.start(
            dir.path(),
            "open",
            &args(&format!(
                "-machine q35 -m 64 -nodefaults -drive file={0}/split.qcow2,format=qcow2,if=virtio,id=split
                 -drive file={0}/base.raw,format=raw,if=virtio,id=plain -drive file={0}/cd.iso,format=raw,if=none,media=cdrom,id=cd
                 -device ide-cd,id=cdev,drive=cd",
                dir.path().display()
            )),
        );
        let split = disks(&mut vm).into_iter().find(|disk| disk.name == "split").unwrap();
        assert_eq!(split.data_files, [path("split.data").display().to_string()]);
        let process = find(&Selector::Pid(vm.pid())).unwrap();
        let blocks = ram_blocks(&mut vm.qmp, process.pid).unwrap();
        let mut look = || gather::source(&mut vm.qmp, &process, blocks.clone()).unwrap();

        let facts = look();
        assert_eq!(facts.files_not_open, []);
        let needed: Vec<_> = needed_files(&facts.vm).into_iter().map(|file| file.path).collect();
        for name in ["split.qcow2", "split.data", "base.raw", "cd.iso"] {
            assert!(needed.contains(&path(name).display().to_string()), "{needed:?}");
        }
        // A copy with the same content, an overlay's name for its base, nothing at all.
        fs::copy(path("split.data"), path("restored")).unwrap();
        fs::rename(path("restored"), path("split.data")).unwrap();
        fs::rename(path("base.raw"), path("base.raw.old")).unwrap();
        qcow2(&path("base.raw"), "1M");
        fs::remove_file(path("cd.iso")).unwrap();
        let facts = look();
        let stray = |name: &str, is_there: bool| {
            let path = path(name).display().to_string();
            facts.files_not_open.iter().any(|stray| stray.path == path && stray.is_there == is_there)
        };
        assert!(stray("split.data", true) && stray("base.raw", true) && stray("cd.iso", false), "{facts:?}");
        assert_eq!(facts.files_not_open.len(), 3);
        let codes: Vec<_> = check_source(&facts)
            .into_iter()
            .filter(|finding| finding.severity == Severity::Blocker)
            .map(|finding| finding.code)
            .collect();
        for code in ["file-replaced", "file-deleted"] {
            assert!(codes.iter().any(|found| found == code), "{codes:?}");
        }
        // After the remedies of the findings.
        fs::rename(path("base.raw.old"), path("base.raw")).unwrap();
        vm.command("eject", json!({"id": "cdev", "force": true}));
        let facts = gather::source(&mut vm.qmp, &process, blocks.clone()).unwrap();
        let paths: Vec<_> = facts.files_not_open.iter().map(|stray| stray.path.as_str()).collect();
        assert!(paths.iter().all(|path| path.ends_with("split.data")), "{paths:?}");
        // A process whose descriptors are unknown confirms no file.
        assert!(files_not_open(&facts.vm, &whimbrel_qemu::preflight::OpenFiles::default()).len() >= 3);
    }
}
