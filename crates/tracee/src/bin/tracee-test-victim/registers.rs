//! Threads that keep known values in their registers and check that they stay.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, _xgetbv};

use super::{Prepare, Round};

pub(super) const WORKERS: &[(&str, Prepare)] =
    &[("general-registers", general), ("vector-registers", vector), ("vector-registers-2", vector)];

fn general() -> Round {
    let mut seed = 0x0123_4567_89ab_cdefu64;
    Box::new(move || {
        seed = seed.rotate_left(7) ^ 0x55;
        if general_registers_stay(seed, 20_000) {
            Ok(())
        } else {
            Err("a register, a flag or the red zone changed".into())
        }
    })
}

/// Fills all general registers and the red zone with values made from `seed`, and checks them
/// `rounds` times.
fn general_registers_stay(seed: u64, rounds: u64) -> bool {
    let bad: u64;
    // SAFETY: every register is saved or declared, the stack pointer is restored, and only memory
    // below it is written, which the compiler leaves to a block that may push.
    unsafe {
        asm!(
            "push rbp", "push rbx", "push rsi",
            // Expected values, as a table on the stack; the counter is above it.
            "lea rax, [rdi + 1]", "lea rbx, [rdi + 2]", "lea rcx, [rdi + 3]", "lea rdx, [rdi + 4]",
            "lea rsi, [rdi + 5]", "lea rbp, [rdi + 6]", "lea r8, [rdi + 7]", "lea r9, [rdi + 8]",
            "lea r10, [rdi + 9]", "lea r11, [rdi + 10]", "lea r12, [rdi + 11]", "lea r13, [rdi + 12]",
            "lea r14, [rdi + 13]", "lea r15, [rdi + 14]",
            "push rax", "push rbx", "push rcx", "push rdx", "push rsi", "push rbp", "push r8", "push r9",
            "push r10", "push r11", "push r12", "push r13", "push r14", "push r15", "push rdi",
            // The red zone.
            "mov [rsp - 8], rax", "mov [rsp - 16], rbx", "mov [rsp - 24], rcx", "mov [rsp - 32], rdx",
            "mov [rsp - 40], rsi", "mov [rsp - 48], rbp", "mov [rsp - 56], r8", "mov [rsp - 64], r9",
            "mov [rsp - 72], r10", "mov [rsp - 80], r11", "mov [rsp - 88], r12", "mov [rsp - 96], r13",
            "mov [rsp - 104], r14", "mov [rsp - 112], r15", "mov [rsp - 120], rdi", "mov [rsp - 128], rax",
            "2:",
            "cmp rax, [rsp + 112]", "jne 3f", "cmp rbx, [rsp + 104]", "jne 3f",
            "cmp rcx, [rsp + 96]", "jne 3f", "cmp rdx, [rsp + 88]", "jne 3f",
            "cmp rsi, [rsp + 80]", "jne 3f", "cmp rbp, [rsp + 72]", "jne 3f",
            "cmp r8, [rsp + 64]", "jne 3f", "cmp r9, [rsp + 56]", "jne 3f",
            "cmp r10, [rsp + 48]", "jne 3f", "cmp r11, [rsp + 40]", "jne 3f",
            "cmp r12, [rsp + 32]", "jne 3f", "cmp r13, [rsp + 24]", "jne 3f",
            "cmp r14, [rsp + 16]", "jne 3f", "cmp r15, [rsp + 8]", "jne 3f",
            "cmp rdi, [rsp]", "jne 3f",
            "cmp rax, [rsp - 8]", "jne 3f", "cmp rbx, [rsp - 16]", "jne 3f",
            "cmp rcx, [rsp - 24]", "jne 3f", "cmp rdx, [rsp - 32]", "jne 3f",
            "cmp rsi, [rsp - 40]", "jne 3f", "cmp rbp, [rsp - 48]", "jne 3f",
            "cmp r8, [rsp - 56]", "jne 3f", "cmp r9, [rsp - 64]", "jne 3f",
            "cmp r10, [rsp - 72]", "jne 3f", "cmp r11, [rsp - 80]", "jne 3f",
            "cmp r12, [rsp - 88]", "jne 3f", "cmp r13, [rsp - 96]", "jne 3f",
            "cmp r14, [rsp - 104]", "jne 3f", "cmp r15, [rsp - 112]", "jne 3f",
            "cmp rdi, [rsp - 120]", "jne 3f", "cmp rax, [rsp - 128]", "jne 3f",
            // Flags: carry and direction set, for some instructions.
            "stc", "std", "pause", "nop", "nop", "nop", "nop", "cld", "jnc 3f",
            "dec qword ptr [rsp + 120]", "jnz 2b",
            "xor eax, eax", "jmp 4f",
            "3:", "mov eax, 1",
            "4:", "cld", "add rsp, 128", "pop rbx", "pop rbp",
            inlateout("rdi") seed => _, inlateout("rsi") rounds => _, lateout("rax") bad,
            lateout("rcx") _, lateout("rdx") _, lateout("r8") _, lateout("r9") _, lateout("r10") _,
            lateout("r11") _, lateout("r12") _, lateout("r13") _, lateout("r14") _, lateout("r15") _,
        );
    }
    bad == 0
}

/// Room for an XSAVE image of the maximum size of today's x86-64.
#[repr(C, align(64))]
struct Image([u8; 16 * 1024]);

/// Location of a component's registers in an image: first byte, and the byte after the last.
type Part = (usize, usize);

const PKRU: u64 = 1 << 9;
const TILE_CONFIG: u64 = 1 << 17;
const TILE_DATA: u64 = 1 << 18;

fn vector() -> Round {
    let tiles = request_tiles();
    // SAFETY: the processor has XSAVE, as every one with AVX; the kernel enabled it.
    let enabled = unsafe { _xgetbv(0) };
    let mask = enabled & !PKRU & if tiles { u64::MAX } else { !(TILE_CONFIG | TILE_DATA) };
    let mut pattern = Box::new(Image([0; 16 * 1024]));
    let mut after = Box::new(Image([0; 16 * 1024]));
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let parts = prepare_pattern(&mut pattern, mask);
    Box::new(move || {
        for &(start, end) in &parts {
            for byte in &mut pattern.0[start..end] {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                *byte = (seed >> 56) as u8;
            }
        }
        hold(&pattern, &mut after, mask);
        let changed = parts.iter().find(|&&(start, end)| pattern.0[start..end] != after.0[start..end]);
        let control = pattern.0[0..4] == after.0[0..4] && pattern.0[24..28] == after.0[24..28];
        match changed {
            None if control => Ok(()),
            None => Err("a control word of x87 or SSE changed".into()),
            Some((start, end)) => {
                Err(format!("vector registers at {start}..{end} of the XSAVE image changed"))
            }
        }
    })
}

/// Requests AMX tiles from the kernel; returns true if this processor has them.
fn request_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: i32 = 0x1023;
    // SAFETY: all arguments are integers.
    unsafe { nix::libc::syscall(nix::libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, 18) == 0 }
}

/// Makes `image` a valid one in which all components of `mask` are in use; returns the locations of
/// their registers.
fn prepare_pattern(image: &mut Image, mask: u64) -> Vec<Part> {
    // x87 control word and tag word (all registers in use), MXCSR with rounding up.
    image.0[0..2].copy_from_slice(&0x0f7fu16.to_le_bytes());
    image.0[4] = 0xff;
    image.0[24..28].copy_from_slice(&0x5f80u32.to_le_bytes());
    image.0[512..520].copy_from_slice(&mask.to_le_bytes());
    // Eight x87 registers of ten bytes each, sixteen SSE registers.
    let mut parts: Vec<Part> = (0..8).map(|i| (32 + i * 16, 42 + i * 16)).collect();
    parts.push((160, 416));
    for bit in 2..63 {
        if mask & (1 << bit) == 0 {
            continue;
        }
        let component = __cpuid_count(0xd, bit);
        let (start, len) = (component.ebx as usize, component.eax as usize);
        if 1 << bit == TILE_CONFIG {
            // Palette 1: eight tiles of 16 rows with 64 bytes.
            image.0[start] = 1;
            for tile in 0..8 {
                image.0[start + 16 + tile * 2] = 64;
                image.0[start + 48 + tile] = 16;
            }
        } else {
            parts.push((start, start + len));
        }
    }
    parts
}

/// Loads all registers from `pattern`, spins for some ten microseconds, and stores them to `after`.
fn hold(pattern: &Image, after: &mut Image, mask: u64) {
    let mut own = Box::new(Image([0; 16 * 1024]));
    // SAFETY: the images are aligned, large enough and valid; the thread's own vector registers
    // are saved first and restored last.
    unsafe {
        asm!(
            "xsave64 [{own}]",
            "xrstor64 [{pattern}]",
            "mov {count:e}, 2000",
            "2:", "pause", "dec {count:e}", "jnz 2b",
            "xsave64 [{after}]",
            "xrstor64 [{own}]",
            own = in(reg) own.0.as_mut_ptr(),
            pattern = in(reg) pattern.0.as_ptr(),
            after = in(reg) after.0.as_mut_ptr(),
            count = out(reg) _,
            in("eax") mask as u32,
            in("edx") (mask >> 32) as u32,
        );
    }
}
