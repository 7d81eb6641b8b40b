//! Refusal to start a VM a second time: while another host owns it, or from images that it left here when it moved
//! away.

use std::path::Path;

use proto::VmName;
use qemu::find::QemuProcess;
use qemu::preflight::OpenFiles;
use qemu::process::Launch;

use crate::Context;
use crate::leftover_images;
use crate::ownership;
use api::{LeftoverImage, Problem, ProblemKind, RunRequest};

/// Outdated images of VMs that moved away. No VM may be started from them.
#[derive(Debug)]
pub(super) struct SecondCopy {
    old_states: Vec<LeftoverImage>,
}

impl SecondCopy {
    /// Checks the VM's owner, and the files that QEMU's arguments name.
    ///
    /// # Errors
    /// When the VM would be a second copy, unless the request says that this is known.
    pub(super) fn before_start(
        context: &Context,
        name: &VmName,
        launch: &Launch,
        request: &RunRequest,
    ) -> Result<Self, Problem> {
        if request.accept_risk {
            return Ok(Self { old_states: Vec::new() });
        }
        if let Some(finding) =
            ownership::refused(context, name).filter(|finding| finding.code == "owned-elsewhere")
        {
            let advice = format!(
                "start it there; if it does not run there and never will again, use `--accept-risk`, and \
                 then `whimbrel vm claim {name}`"
            );
            return Err(Problem::new(ProblemKind::Conflict, finding.what, advice));
        }
        let old_states = leftover_images::old_states(context)
            .map_err(|error| Problem::caused_by(ProblemKind::Internal, &error, "see the agent's log"))?;
        let directory = launch.cwd.as_deref().unwrap_or(Path::new("/"));
        let texts: Vec<&str> = launch.argv.iter().filter_map(|argument| argument.to_str()).collect();
        let is_named = |image: &&LeftoverImage| texts.iter().any(|text| names(text, directory, &image.path));
        old_states.iter().find(is_named).map_or(Ok(()), |image| Err(refused(image)))?;
        Ok(Self { old_states })
    }

    /// Looks at the files that QEMU has opened, however its arguments named them.
    ///
    /// # Errors
    /// When one of them is an old state. The caller ends QEMU.
    pub(super) fn after_start(&self, process: &QemuProcess) -> Result<(), Problem> {
        if self.old_states.is_empty() {
            return Ok(());
        }
        let open = OpenFiles::of(process.pid).map_err(|error| {
            let advice = "make sure that the agent may read /proc of its own processes";
            Problem::caused_by(ProblemKind::Internal, &error, advice)
        })?;
        let is_open = |image: &&LeftoverImage| open.has(&image.path);
        self.old_states.iter().find(is_open).map_or(Ok(()), |image| Err(refused(image)))
    }
}

/// True if a word of an argument is a path of the file. A path with separators in it is missed, and found once QEMU has
/// it open.
fn names(argument: &str, directory: &Path, file: &Path) -> bool {
    let words = argument.split([',', '=', '"']).chain([argument]);
    words
        .filter(|word| !word.is_empty())
        .any(|word| leftover_images::is_same_file(&directory.join(word), file))
}

fn refused(image: &LeftoverImage) -> Problem {
    let LeftoverImage { migration, to, path, .. } = image;
    let vm = &migration.vm;
    let error = format!(
        "{vm} left {} here when it was migrated to {to} with its disks ({migration}): it is an old state, \
         and the VM may run there",
        path.display()
    );
    let advice = format!("start it at {to}; to return to the old state anyway, use `--accept-risk`");
    Problem::new(ProblemKind::Conflict, error, advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_argument_that_names_the_file_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk.raw");
        std::fs::write(&disk, "x").unwrap();
        let is_named = |argument: &str| names(argument, folder.path(), &disk);
        for argument in [
            "file=disk.raw,if=virtio",
            "driver=raw,file.driver=file,file.filename=./disk.raw",
            "disk.raw",
            r#"{"driver":"raw","file":{"driver":"file","filename":"disk.raw"}}"#,
            &format!("file={}", disk.display()),
        ] {
            assert!(is_named(argument), "{argument}");
        }
        assert!(!is_named("file=other.raw,if=virtio") && !is_named("-nodefaults"));
    }
}
