//! Injector: main function of the small separate process.
//!
//! It reads a request from its standard input, executes it, answers, and waits for the next; it
//! ends when the agent does. It is a session leader of its own, so that neither Ctrl-C nor the end
//! of the agent reaches it, blocks every signal, is locked into memory, and is the last process
//! that the OOM killer chooses, as far as it has the permissions for all that.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::process::ExitCode;

use nix::libc;
use nix::sys::mman::{MlockAllFlags, mlockall};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};

use super::thread::{Buffers, HeldThread, Refusal, Steps, Target};
use super::wire::{
    Failure, LASTING_USERFAULTFD_FLAGS, MAX_WORDS, Operation, Reply, Request, USERFAULTFD_FLAGS,
};
use crate::Process;

/// Runs the injector on standard input, which has to be one end of the socket pair of an
/// [`crate::Injector`]. Called from `main` by the program that [`crate::Injector::new`] names, and
/// before any other thread is started.
pub fn injector_main() -> ExitCode {
    let _ = rustix::process::setsid();
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None);
    // SAFETY: the default action is no function of ours. An ignored signal would not be queued.
    let _ = unsafe { nix::sys::signal::signal(Signal::SIGCHLD, nix::sys::signal::SigHandler::SigDfl) };
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let mut buffers = Buffers::new();
    let _ = mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE);
    let stdin = std::io::stdin();
    let mut bytes = vec![0; MAX_WORDS * 8 + 1];
    loop {
        let len = match recv(&stdin, bytes.as_mut_slice(), RecvFlags::empty()) {
            Ok((len, _)) if len > 0 => len,
            Err(rustix::io::Errno::INTR) => continue,
            // The agent has ended.
            Ok(_) => return ExitCode::SUCCESS,
            Err(_) => return ExitCode::FAILURE,
        };
        let (reply, descriptor) = match Request::decode(&bytes[..len]) {
            Some(request) => serve(&request, &mut buffers),
            None => (failed(Failure::Request), None),
        };
        let mut sent = send(stdin.as_fd(), &reply, descriptor.as_ref().map(AsFd::as_fd));
        if let Some(descriptor) = descriptor {
            // The reply is sent again when the agent holds the only reference.
            drop(descriptor);
            sent = sent.and_then(|_| send(stdin.as_fd(), &reply, None));
        }
        if reply.ends || sent.is_err() {
            return ExitCode::FAILURE;
        }
    }
}

fn failed(failure: Failure) -> Reply {
    Reply { result: Err(failure), done: 0, steps: 0, thread: 0, self_restoring: false, ends: false }
}

fn send(
    socket: BorrowedFd<'_>,
    reply: &Reply,
    descriptor: Option<BorrowedFd<'_>>,
) -> rustix::io::Result<usize> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|one| [one]);
    if let Some(descriptors) = &descriptors {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let bytes = reply.encode();
    sendmsg(socket, &[std::io::IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
}

/// Executes a request.
fn serve(request: &Request, buffers: &mut Buffers) -> (Reply, Option<OwnedFd>) {
    let Ok(process) = Process::open_exact(request.pid as u32, request.start_time) else {
        return (failed(Failure::Gone), None);
    };
    let Some(calls) = calls(request) else { return (failed(Failure::Request), None) };
    let sigreturn = (request.sigreturn != 0).then_some(request.sigreturn);
    let target = Target { pid: request.pid, gadget: request.gadget, sigreturn };
    let mut steps = Steps { taken: 0, die_at: request.die_at };
    let mut reply = failed(Failure::Gone);
    let mut descriptor = None;
    if request.operation == Operation::Cancel {
        reply.result = Ok(());
        for &thread in &request.threads {
            let cancelled = HeldThread::cancel(thread, target, buffers, &mut steps, &mut reply.ends);
            reply.done += u64::from(cancelled);
        }
        reply.steps = steps.taken;
        return (reply, None);
    }
    // If no thread can restore itself, one is used that this process has to restore.
    let mut busy = Vec::with_capacity(request.threads.len());
    let mut first = request.threads.iter().map(|&thread| (thread, true));
    while let Some((thread, only_self_restoring)) = first.next().or_else(|| busy.pop()) {
        let used = HeldThread::stop(
            thread,
            target,
            &calls,
            only_self_restoring,
            buffers,
            &mut steps,
            &mut reply.ends,
        )
        .map(|mut held| {
            (reply.thread, reply.self_restoring) = (held.thread(), held.is_self_restoring());
            // `held` is released at the end of this block.
            let outcome = run(&mut held, request.operation, &calls, &process);
            (outcome, held.is_in_call())
        });
        match used {
            Ok((outcome, left)) => {
                (reply.result, reply.done, descriptor) = outcome;
                reply.ends |= left;
                break;
            }
            Err(Refusal::TryAnother(failure)) => {
                if failure == Failure::Busy && only_self_restoring {
                    busy.push((thread, false));
                }
                reply.result = Err(failure);
            }
            Err(Refusal::GiveUp(failure)) => {
                reply.result = Err(match failure {
                    Failure::NotPermitted => permission_failure(&process, thread),
                    failure => failure,
                });
                break;
            }
        }
    }
    reply.steps = steps.taken;
    (reply, descriptor)
}

/// Returns the calls of an operation, to be checked before the first is made.
fn calls(request: &Request) -> Option<Vec<(u64, [u64; 3])>> {
    let arguments = &request.arguments[..];
    Some(match request.operation {
        Operation::CreateUserfaultfd => vec![
            (libc::SYS_userfaultfd as u64, [USERFAULTFD_FLAGS, 0, 0]),
            // With the number that the first call returns.
            (libc::SYS_close as u64, [0; 3]),
        ],
        Operation::CreateLastingUserfaultfd => vec![
            (libc::SYS_userfaultfd as u64, [LASTING_USERFAULTFD_FLAGS, 0, 0]),
            // Only if it cannot be duplicated.
            (libc::SYS_close as u64, [0; 3]),
        ],
        Operation::Close => arguments.iter().map(|&fd| (libc::SYS_close as u64, [fd, 0, 0])).collect(),
        Operation::Discard => {
            let (pairs, []) = arguments.as_chunks::<2>() else { return None };
            let advice = libc::MADV_DONTNEED as u64;
            pairs.iter().map(|&[start, len]| (libc::SYS_madvise as u64, [start, len, advice])).collect()
        }
        Operation::Cancel => Vec::new(),
    })
}

/// Makes the calls; returns the result, the number of calls that were made, and the descriptor if
/// one was requested. For that operation the number is that of the descriptor in the other process.
fn run(
    held: &mut HeldThread<'_>,
    operation: Operation,
    calls: &[(u64, [u64; 3])],
    process: &Process,
) -> (Result<(), Failure>, u64, Option<OwnedFd>) {
    if matches!(operation, Operation::CreateUserfaultfd | Operation::CreateLastingUserfaultfd) {
        return match take(held, calls, process, operation == Operation::CreateLastingUserfaultfd) {
            Ok((descriptor, there)) => (Ok(()), there, Some(descriptor)),
            Err(failure) => (Err(failure), 0, None),
        };
    }
    let mut done = 0;
    for &(number, arguments) in calls {
        if let Err(failure) = call(held, number, arguments) {
            return (Err(failure), done, None);
        }
        done += 1;
    }
    (Ok(()), done, None)
}

/// Creates a userfaultfd in the other process and duplicates it here; closes it there unless it is to stay. Returns
/// its number there, too.
fn take(
    held: &mut HeldThread<'_>,
    calls: &[(u64, [u64; 3])],
    process: &Process,
    stays: bool,
) -> Result<(OwnedFd, u64), Failure> {
    let &[(userfaultfd, flags), (close, _)] = calls else { return Err(Failure::Request) };
    let there = call(held, userfaultfd, flags)?;
    held.step();
    // SAFETY: all arguments are integers; the pidfd is open.
    let here = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_fd().as_raw_fd(), there as i32, 0) };
    let taken = if here < 0 {
        Err(Failure::Kernel(super::ptrace::errno() as u64))
    } else {
        // SAFETY: the kernel has just created this descriptor, and no other code knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(here as i32) })
    };
    held.step();
    if !stays || taken.is_err() {
        call(held, close, [there, 0, 0])?;
    }
    Ok((taken?, there))
}

fn call(held: &mut HeldThread<'_>, number: u64, arguments: [u64; 3]) -> Result<u64, Failure> {
    let result = held.call(number, arguments)?;
    u64::try_from(result).map_err(|_| Failure::Call(result.unsigned_abs()))
}

/// Returns the reason why a thread may not be seized: another process traces it, it has just ended, or permission is
/// missing.
fn permission_failure(process: &Process, thread: i32) -> Failure {
    if !process.is_alive() {
        return Failure::Gone;
    }
    let status = fs::read_to_string(process.path(&format!("task/{thread}/status"))).unwrap_or_default();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:")?.trim().parse().ok());
    match tracer {
        None | Some(0) => Failure::NotPermitted,
        Some(tracer) => Failure::Traced(tracer),
    }
}
