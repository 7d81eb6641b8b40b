//! whimbrel-engine
