//! Flags of the linker.

fn main() {
    // A table of 350 kB becomes one of 4 kB. The program then needs glibc 2.36, which is that of Debian 12.
    println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    // Functions that became the same code are kept once, unless their addresses are compared. The linker of Rust for
    // x86-64 knows the option; others need not.
    if std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64") {
        println!("cargo::rustc-link-arg-bins=-Wl,--icf=safe");
    }
    println!("cargo::rerun-if-changed=build.rs");
}
