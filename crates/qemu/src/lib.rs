//! whimbrel-qemu
