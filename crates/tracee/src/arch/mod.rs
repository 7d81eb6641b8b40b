//! Processor-specific parts: registers, instructions, the frame through which a signal handler
//! returns. One module per architecture, all with the same items.

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("system calls can be injected on x86-64 only: write arch/<this one>.rs");
