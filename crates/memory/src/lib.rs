//! whimbrel-memory
