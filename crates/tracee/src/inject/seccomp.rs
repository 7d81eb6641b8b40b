//! Evaluation of a seccomp filter for a call, without making the call.
//!
//! A filter may answer with the death of the process, so it is evaluated before. The kernel shows
//! the filters of a stopped thread to a privileged tracer; they are run here as the kernel runs
//! them. QEMU's own `-sandbox on` allows `userfaultfd`, `close` and `madvise` (it lists the
//! forbidden calls); a `SystemCallFilter=` of systemd often does not.

use nix::libc;

use crate::arch::AUDIT_ARCH;

/// Maximum length of a filter that the kernel accepts, in instructions (`BPF_MAXINSNS`).
pub(super) const MAX_FILTER: usize = 4096;

const CLASS: u16 = 0x07;
const LD: u16 = 0x00;
const LDX: u16 = 0x01;
const ST: u16 = 0x02;
const STX: u16 = 0x03;
const ALU: u16 = 0x04;
const JMP: u16 = 0x05;
const RET: u16 = 0x06;
const MISC: u16 = 0x07;
/// Set if the operand of an instruction is the register X, not its constant.
const FROM_X: u16 = 0x08;

/// `struct seccomp_data`: number, architecture, address of the instruction, six arguments.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) number: u32,
    pub(super) instruction: u64,
    pub(super) arguments: [u64; 3],
}

impl Call {
    const LEN: u32 = 64;

    fn word(&self, at: u32) -> Option<u32> {
        let half = |value: u64| if at.is_multiple_of(8) { value as u32 } else { (value >> 32) as u32 };
        match at {
            0 => Some(self.number),
            4 => Some(AUDIT_ARCH),
            8 | 12 => Some(half(self.instruction)),
            16..64 if at.is_multiple_of(4) => {
                Some(half(self.arguments.get((at as usize - 16) / 8).copied().unwrap_or(0)))
            }
            _ => None,
        }
    }
}

/// Returns true if an answer of a filter allows the call.
pub(super) fn allows(answer: u32) -> bool {
    matches!(action(answer), libc::SECCOMP_RET_ALLOW | libc::SECCOMP_RET_LOG)
}

/// Returns the action of an answer, without its data.
pub(super) fn action(answer: u32) -> u32 {
    answer & libc::SECCOMP_RET_ACTION_FULL
}

/// Runs a filter; returns its answer, or nothing if it is not a program that the kernel would have
/// accepted.
pub(super) fn run(filter: &[libc::sock_filter], call: &Call) -> Option<u32> {
    let (mut a, mut x, mut memory) = (0u32, 0u32, [0u32; 16]);
    let mut at = 0usize;
    // Jumps are only forward, so it ends.
    while let Some(&libc::sock_filter { code, jt, jf, k }) = filter.get(at) {
        at += 1;
        let operand = if code & FROM_X == 0 { k } else { x };
        match code & CLASS {
            LD | LDX => {
                let value = match code & 0xe0 {
                    // Immediate, absolute, scratch memory, length of the data.
                    0x00 => k,
                    0x20 => call.word(k)?,
                    0x60 => *memory.get(k as usize)?,
                    0x80 => Call::LEN,
                    _ => return None,
                };
                if code & CLASS == LD { a = value } else { x = value }
            }
            ST => *memory.get_mut(k as usize)? = a,
            STX => *memory.get_mut(k as usize)? = x,
            ALU => {
                a = match code & 0xf0 {
                    0x00 => a.wrapping_add(operand),
                    0x10 => a.wrapping_sub(operand),
                    0x20 => a.wrapping_mul(operand),
                    // A division by zero ends the filter with 0, which is "kill the thread".
                    0x30 => match a.checked_div(operand) {
                        Some(quotient) => quotient,
                        None => return Some(0),
                    },
                    0x40 => a | operand,
                    0x50 => a & operand,
                    0x60 => a.wrapping_shl(operand),
                    0x70 => a.wrapping_shr(operand),
                    0x80 => a.wrapping_neg(),
                    0xa0 => a ^ operand,
                    _ => return None,
                }
            }
            JMP => {
                let taken = match code & 0xf0 {
                    0x00 => {
                        at = at.checked_add(k as usize)?;
                        continue;
                    }
                    0x10 => a == operand,
                    0x20 => a > operand,
                    0x30 => a >= operand,
                    0x40 => a & operand != 0,
                    _ => return None,
                };
                at += usize::from(if taken { jt } else { jf });
            }
            RET => return Some(if code & 0x18 == 0x10 { a } else { k }),
            MISC => {
                if code & 0x80 == 0 {
                    x = a;
                } else {
                    a = x;
                }
            }
            _ => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
        libc::sock_filter { code, jt, jf, k }
    }

    #[test]
    fn a_list_of_forbidden_calls() {
        let filter = [
            op(0x20, 0, 0, 4),
            op(0x15, 1, 0, AUDIT_ARCH),
            op(0x06, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
            op(0x20, 0, 0, 0),
            op(0x15, 0, 1, 323),
            op(0x06, 0, 0, libc::SECCOMP_RET_ERRNO | 1),
            op(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let call = |number| Call { number, instruction: 0, arguments: [0; 3] };
        assert_eq!(run(&filter, &call(323)), Some(libc::SECCOMP_RET_ERRNO | 1));
        assert_eq!(run(&filter, &call(3)), Some(libc::SECCOMP_RET_ALLOW));
        assert!(!allows(libc::SECCOMP_RET_ERRNO | 1) && allows(libc::SECCOMP_RET_LOG));
        assert_eq!(run(&filter[..5], &call(3)), None);
    }

    #[test]
    fn arguments_and_arithmetic() {
        // Allows the call if the high half of the second argument, plus 2, is 7.
        let filter = [
            op(0x20, 0, 0, 28),
            op(0x04, 0, 0, 2),
            op(0x07, 0, 0, 0),
            op(0x00, 0, 0, 7),
            op(0x1d, 1, 0, 0),
            op(0x06, 0, 0, 0),
            op(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let call = |second| Call { number: 0, instruction: 0, arguments: [0, second, 0] };
        assert_eq!(run(&filter, &call(5 << 32)), Some(libc::SECCOMP_RET_ALLOW));
        assert_eq!(run(&filter, &call(5)), Some(0));
    }
}
