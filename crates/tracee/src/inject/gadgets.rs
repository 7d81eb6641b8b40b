//! Search for the instructions through which a call is injected, in the process's mappings.
//!
//! The injector writes nothing into its code: `syscall; ret` and the return from a signal handler exist in
//! every C library, or in the program itself if it is linked statically. The search reads the
//! memory of the process, so it does not matter whether its files still exist or in which mount
//! namespace; the vDSO is searched first, then the C library, then everything else.

use std::path::Path;

use crate::arch::{SIGRETURN, SYSCALL, SYSCALL_RETURN};
use crate::maps::{self, Mapping};
use crate::{Process, ProcessError, RemoteMemory};

/// Number of bytes of code that are read at once.
const WINDOW: usize = 1 << 20;

/// Addresses of the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gadgets {
    /// Address of `syscall; ret`, or if there is no `sigreturn` perhaps only of `syscall`.
    pub(super) call: u64,
    /// Address of the call of `rt_sigreturn`.
    pub(super) sigreturn: Option<u64>,
}

/// Finds both, or as a last resort a bare `syscall`, with which a thread cannot restore itself.
pub(super) fn find(process: &Process) -> Result<Option<Gadgets>, ProcessError> {
    let mut code: Vec<Mapping> =
        maps::mappings(process)?.into_iter().filter(|one| one.executable && one.readable).collect();
    code.sort_by_key(|mapping| match mapping.name.as_deref() {
        Some(name) if name == Path::new("[vdso]") => 0,
        Some(name) if maps::is_libc(name) => 1,
        Some(_) => 2,
        // Code that the program generates may disappear at any moment (QEMU's TCG).
        None => 3,
    });
    let memory = RemoteMemory::new(process)?;
    let (mut bare, mut call, mut sigreturn) = (None, None, None);
    for mapping in code {
        let mut at = mapping.range.start;
        while at < mapping.range.end && (call.is_none() || sigreturn.is_none()) {
            let len = (mapping.range.end - at).min(WINDOW as u64);
            let mut window = vec![0; len as usize];
            if memory.read(at, &mut window).is_ok() {
                call = call.or_else(|| position(&window, SYSCALL_RETURN, at));
                bare = bare.or_else(|| position(&window, SYSCALL, at));
                let mut forms = SIGRETURN.iter();
                sigreturn = sigreturn.or_else(|| forms.find_map(|form| position(&window, form, at)));
            }
            // A sequence across two windows is not found; libraries have many of each.
            at += len;
        }
    }
    Ok(match (call, sigreturn, bare) {
        (Some(call), Some(_), _) => Some(Gadgets { call, sigreturn }),
        (_, _, Some(bare)) => Some(Gadgets { call: bare, sigreturn: None }),
        _ => None,
    })
}

fn position(code: &[u8], sequence: &[u8], base: u64) -> Option<u64> {
    code.windows(sequence.len()).position(|window| window == sequence).map(|at| base + at as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_a_c_library_has_both() {
        let me = Process::open(std::process::id()).unwrap();
        let found = find(&me).unwrap().unwrap();
        let memory = RemoteMemory::new(&me).unwrap();
        let mut code = [0; 3];
        memory.read(found.call, &mut code).unwrap();
        assert_eq!(code, SYSCALL_RETURN);
        let mut code = [0; 9];
        memory.read(found.sigreturn.unwrap(), &mut code).unwrap();
        assert!(SIGRETURN.iter().any(|form| code.starts_with(form)));
    }
}
