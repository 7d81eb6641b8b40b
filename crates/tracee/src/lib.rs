//! whimbrel-tracee
