//! whimbrel-link
