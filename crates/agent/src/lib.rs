//! whimbrel-agent
