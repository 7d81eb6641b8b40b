//! Flags of the linker.

fn main() {
    // A table of 350 kB becomes one of 4 kB. The program then needs glibc 2.36, which is that of Debian 12.
    println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    println!("cargo::rustc-link-arg-bins=-Wl,--icf=safe");
    println!("cargo::rerun-if-changed=build.rs");
}
