//! x86-64.
//!
//! An injected call runs as `syscall; ret`, with the stack pointer at a frame below the thread's
//! red zone:
//!
//! ```text
//!   stack pointer ─► address of `mov $15, %rax; syscall`      `ret` goes there: rt_sigreturn
//!                    ucontext: all registers, signal mask      and the kernel restores these,
//!                    …
//!                    XSAVE image: x87, SSE, AVX, …, PKRU       and these
//!   red zone (128 bytes that leaf functions use below the stack pointer)
//!   the thread's own stack
//! ```
//!
//! So a thread that is released at any point after its registers were set finishes the call,
//! returns into `rt_sigreturn` and continues as it was, without help from any other process.

use std::arch::x86_64::__cpuid_count;

use nix::libc;

/// Bytes below the stack pointer that belong to the running function (System V ABI, 3.2.2).
const RED_ZONE: u64 = 128;
/// The selector of 64-bit user code; 0x23 is 32-bit code.
const USER_CS_64: u64 = 0x33;

/// Machine code of `syscall`.
pub(crate) const SYSCALL: &[u8] = &[0x0f, 0x05];
/// Machine code of `syscall; ret`.
pub(crate) const SYSCALL_RETURN: &[u8] = &[0x0f, 0x05, 0xc3];
/// Machine code of `mov $15, %rax; syscall`, as in every C library's `__restore_rt`, and its
/// shorter form.
pub(crate) const SIGRETURN: [&[u8]; 2] =
    [&[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05], &[0xb8, 0x0f, 0, 0, 0, 0x0f, 0x05]];

/// Maximum size of an XSAVE image in bytes; x86-64 with AMX has 11 KiB.
pub(crate) const MAX_XSTATE: usize = 32 * 1024;
/// Maximum size of a frame in bytes, including the data around the image.
pub(crate) const MAX_FRAME: usize = MAX_XSTATE + 1024;
/// Number of the register set that holds the XSAVE image.
pub(crate) const NT_X86_XSTATE: usize = 0x202;

/// Errors that never reach a program: the kernel turns them into a restart of the call.
const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;

/// `AUDIT_ARCH_X86_64`, by which seccomp filters know the calling convention.
pub(crate) const AUDIT_ARCH: u32 = 0xC000_003E;

/// Number of bytes before the next instruction that [`Registers::in_named_call`] checks: `mov
/// $number, %eax; syscall`, as in C libraries.
pub(crate) const BEFORE_NEXT: usize = 7;

/// General registers of a stopped thread.
#[derive(Clone, Copy)]
pub(crate) struct Registers(libc::user_regs_struct);

impl Registers {
    /// Returns registers that are all zero, to be filled by the kernel.
    pub(crate) fn zeroed() -> Self {
        // SAFETY: a plain structure of integers.
        Self(unsafe { std::mem::zeroed() })
    }

    /// Returns the kernel's structure.
    pub(crate) fn raw(&mut self) -> &mut libc::user_regs_struct {
        &mut self.0
    }

    /// Returns true if the thread currently runs 64-bit code.
    pub(crate) fn is_64_bit(&self) -> bool {
        self.0.cs == USER_CS_64
    }

    /// Returns the address of the next instruction.
    pub(crate) fn instruction(&self) -> u64 {
        self.0.rip
    }

    /// Returns the stack pointer.
    pub(crate) fn stack(&self) -> u64 {
        self.0.rsp
    }

    /// Returns the registers of the same thread after a `ret` to `address`.
    pub(crate) fn returned_to(&self, address: u64) -> Self {
        let mut registers = self.0;
        registers.rip = address;
        registers.rsp = registers.rsp.wrapping_add(8);
        registers.orig_rax = u64::MAX;
        Self(registers)
    }

    /// Returns the registers to which the frame of a thread that is about to make a call restores
    /// it: the same, but with that instruction and stack.
    pub(crate) fn interrupted(&self, read: impl Fn(u64) -> Option<u64>) -> Option<Self> {
        let word = |at: usize| read(self.0.rsp.checked_add(8 + 8 * (MCONTEXT_WORD + at) as u64)?);
        let mut registers = self.0;
        registers.rsp = word(15)?;
        registers.rip = word(16)?;
        Some(Self(registers))
    }

    /// Returns the result of the call that has just ended.
    pub(crate) fn result(&self) -> i64 {
        self.0.rax as i64
    }

    /// Returns the number of the call that the thread is in.
    pub(crate) fn call_number(&self) -> u64 {
        self.0.orig_rax
    }

    /// Returns the registers of the same thread about to run `syscall` at `gadget`, with the stack
    /// pointer at `stack` if that is given.
    pub(crate) fn calling(&self, gadget: u64, stack: Option<u64>, number: u64, arguments: [u64; 3]) -> Self {
        let mut registers = self.0;
        registers.rip = gadget;
        registers.rsp = stack.unwrap_or(registers.rsp);
        registers.rax = number;
        // No call is in progress, so the kernel must not restart one.
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx] = arguments;
        Self(registers)
    }

    /// Returns true if the thread was interrupted in the continuation of an earlier call
    /// (`restart_syscall`), whose number only the kernel knows.
    pub(crate) fn is_continuing_call(&self) -> bool {
        self.0.rax as i64 == ERESTART_RESTARTBLOCK && self.0.orig_rax == libc::SYS_restart_syscall as u64
    }

    /// Returns the registers of the same thread in the call that its code names, if it does so
    /// right before the instruction `syscall`; `code` are the bytes before the next instruction.
    pub(crate) fn in_named_call(&self, code: [u8; BEFORE_NEXT]) -> Option<Self> {
        let [0xb8, a, b, c, d, 0x0f, 0x05] = code else { return None };
        let mut registers = self.0;
        registers.orig_rax = u64::from(u32::from_le_bytes([a, b, c, d]));
        Some(Self(registers))
    }

    /// Returns the registers that a frame must restore so that the thread continues as if it had
    /// not been interrupted.
    ///
    /// A thread that was interrupted inside a system call has an error in the range that only the
    /// kernel uses, and at this point the kernel would make it run the `syscall` instruction again.
    /// The frame does the same.
    ///
    /// For `ERESTART_RESTARTBLOCK` (`nanosleep`, `poll` and `futex` with a relative timeout) the
    /// kernel would continue with the remaining time, which it remembers but `rt_sigreturn`
    /// discards; so the call begins anew: its timeout runs once more from the start, which is less
    /// harm than an `EINTR` that a program without signal handlers never expects. This is for
    /// threads whose injector was killed; the normal way restores the original registers and leaves
    /// the restart to the kernel.
    fn restartable(&self) -> libc::user_regs_struct {
        let mut registers = self.0;
        let interrupted = matches!(
            registers.rax as i64,
            ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND | ERESTART_RESTARTBLOCK
        );
        if registers.orig_rax as i64 >= 0 && interrupted {
            registers.rax = registers.orig_rax;
            registers.rip -= SYSCALL.len() as u64;
        }
        registers
    }
}

/// Location of a frame in the memory of the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    /// First address: the stack pointer at the injected call.
    pub(crate) address: u64,
    /// Length in bytes.
    pub(crate) len: usize,
}

const UC_FP_XSTATE: u64 = 1;
const UC_SIGCONTEXT_SS: u64 = 2;
const UC_STRICT_RESTORE_SS: u64 = 4;
/// Not a valid mode of an alternate stack, so the kernel leaves the thread's alternate stack
/// unchanged.
const INVALID_STACK_FLAGS: u64 = 0x7f;

/// Length of the kernel's `struct ucontext`, in 8-byte words.
const UCONTEXT_WORDS: usize = 38;
const UCONTEXT_BYTES: u64 = UCONTEXT_WORDS as u64 * 8;
/// Index of the registers, after `uc_flags`, `uc_link`, `uc_stack` (three words).
const MCONTEXT_WORD: usize = 5;
const SIGMASK_WORD: usize = 37;
const _: () = assert!(std::mem::offset_of!(libc::ucontext_t, uc_mcontext) == MCONTEXT_WORD * 8);

/// Offsets within the XSAVE image: area for software, components that are present, end of the
/// header.
const SW_RESERVED: usize = 464;
const XSTATE_BV: usize = 512;
const XSAVE_HEADER_END: usize = 576;
const FP_XSTATE_MAGIC1: u32 = 0x4650_5853;
const FP_XSTATE_MAGIC2: u32 = 0x4650_5845;
/// AMX tiles: the only component that a thread has to request, and that its frames contain only
/// then.
const XTILE_DATA: u64 = 1 << 18;

/// Builds the frame that restores `registers`, the XSAVE image and the signal mask by itself.
///
/// `xstate` is the image as `PTRACE_GETREGSET` returns it, `sigreturn` the address of an
/// instruction sequence of [`SIGRETURN`]. Returns the location where it has to be written, or
/// nothing if the format of the image is not supported.
pub(crate) fn build_frame(
    out: &mut [u8],
    registers: &Registers,
    xstate: &[u8],
    signal_mask: u64,
    sigreturn: u64,
) -> Option<Placement> {
    let word = |at: usize| Some(u64::from_le_bytes(xstate.get(at..at + 8)?.try_into().ok()?));
    let enabled = word(SW_RESERVED)?;
    let in_use = word(XSTATE_BV)?;
    let features = (enabled & !XTILE_DATA) | (in_use & XTILE_DATA);
    let size = xstate_size(features);
    let image = xstate.get(..size)?;

    let top = registers.0.rsp.checked_sub(RED_ZONE)?;
    let fp = top.checked_sub(size as u64 + 4)? & !63;
    let ucontext = (fp - UCONTEXT_BYTES) & !15;
    let address = ucontext - 8;
    let len = (fp - address) as usize + size + 4;
    let frame = out.get_mut(..len)?;
    frame.fill(0);

    let r = registers.restartable();
    let segments =
        (r.cs & 0xffff) | ((r.gs & 0xffff) << 16) | ((r.fs & 0xffff) << 32) | ((r.ss & 0xffff) << 48);
    let mut words = [0u64; 1 + UCONTEXT_WORDS];
    words[0] = sigreturn;
    let uc = &mut words[1..];
    uc[0] = UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS;
    uc[3] = INVALID_STACK_FLAGS;
    uc[MCONTEXT_WORD..MCONTEXT_WORD + 19].copy_from_slice(&[
        r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax,
        r.rcx, r.rsp, r.rip, r.eflags, segments,
    ]);
    // The pointer to the XSAVE image follows err, trapno, oldmask and cr2.
    uc[MCONTEXT_WORD + 23] = fp;
    uc[SIGMASK_WORD] = signal_mask;
    for (at, word) in frame.chunks_exact_mut(8).zip(words) {
        at.copy_from_slice(&word.to_le_bytes());
    }

    let (_, at_fp) = frame.split_at_mut((fp - address) as usize);
    at_fp[..size].copy_from_slice(image);
    let software = &mut at_fp[SW_RESERVED..XSTATE_BV];
    software.fill(0);
    software[0..4].copy_from_slice(&FP_XSTATE_MAGIC1.to_le_bytes());
    software[4..8].copy_from_slice(&(size as u32 + 4).to_le_bytes());
    software[8..16].copy_from_slice(&features.to_le_bytes());
    software[16..20].copy_from_slice(&(size as u32).to_le_bytes());
    at_fp[size..size + 4].copy_from_slice(&FP_XSTATE_MAGIC2.to_le_bytes());
    Some(Placement { address, len })
}

/// Returns the length in bytes of an XSAVE image in standard format with these components.
fn xstate_size(features: u64) -> usize {
    (2..63u32)
        .filter(|bit| features & (1 << bit) != 0)
        .map(|bit| {
            let component = __cpuid_count(0xd, bit);
            (component.eax + component.ebx) as usize
        })
        .fold(XSAVE_HEADER_END, usize::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers(rax: i64, orig_rax: i64) -> Registers {
        let mut registers = Registers::zeroed();
        registers.0.rax = rax as u64;
        registers.0.orig_rax = orig_rax as u64;
        registers.0.rip = 0x1000;
        registers.0.rsp = 0x7fff_0000_1238;
        registers
    }

    #[test]
    fn an_interrupted_call_is_made_again_and_a_finished_one_is_not() {
        for code in [ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK] {
            let r = registers(code, 7).restartable();
            assert_eq!((r.rax, r.rip), (7, 0xffe), "{code}");
            // The same number as a plain value in user code is not changed.
            let r = registers(code, -1).restartable();
            assert_eq!((r.rax as i64, r.rip), (code, 0x1000));
        }
        let r = registers(-4, 7).restartable();
        assert_eq!((r.rax as i64, r.rip), (-4, 0x1000));
    }

    #[test]
    fn a_call_that_was_continued_is_known_from_the_code_before_it() {
        let continued = registers(ERESTART_RESTARTBLOCK, 219);
        assert!(continued.is_continuing_call());
        assert!(!registers(ERESTART_RESTARTBLOCK, 7).is_continuing_call());
        assert!(!registers(0, 219).is_continuing_call());
        let named = continued.in_named_call([0xb8, 0xe6, 0, 0, 0, 0x0f, 0x05]).unwrap();
        assert_eq!(named.restartable().rax, 230);
        assert!(continued.in_named_call([0x89, 0xf8, 0, 0, 0, 0x0f, 0x05]).is_none());
    }

    #[test]
    fn the_frame_stays_below_the_red_zone_and_is_aligned() {
        let mut image = vec![0u8; 4096];
        // x87, SSE and AVX enabled, SSE in use.
        image[SW_RESERVED] = 7;
        image[XSTATE_BV] = 2;
        let mut out = vec![0xffu8; MAX_FRAME];
        let r = registers(0, -1);
        let placed = build_frame(&mut out, &r, &image, 0x55, 0x4000).unwrap();
        assert!(placed.address + placed.len as u64 <= r.0.rsp - RED_ZONE);
        assert_eq!(placed.address % 16, 8);
        let fp = u64::from_le_bytes(out[8 + 28 * 8..8 + 29 * 8].try_into().unwrap());
        assert_eq!(fp % 64, 0);
        assert_eq!(out[..8], 0x4000u64.to_le_bytes());
        assert_eq!(out[8 + 37 * 8], 0x55);
        assert!(placed.len < 4096);
        assert!(build_frame(&mut out, &r, &image[..500], 0, 0).is_none());
    }
}
