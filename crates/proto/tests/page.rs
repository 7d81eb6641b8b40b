//! docs/protocol.md is generated from the documentation in the source, so that the two always agree. After a change:
//! `BLESS=1 cargo test -p whimbrel-proto --test page`.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fmt::Write;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/protocol.md");

/// Returns the module's own documentation.
fn module_page(source: &str) -> String {
    let lines = source.lines().map_while(|line| line.strip_prefix("//!"));
    lines.map(|line| plain(line.strip_prefix(' ').unwrap_or(line)) + "\n").collect()
}

/// Removes links, which have no meaning outside the source: [`limits`] becomes `limits`, [delta](delta) becomes delta.
fn plain(line: &str) -> String {
    let mut plain = String::new();
    let mut rest = line;
    while let Some((before, link)) = rest.split_once('[') {
        let Some((text, after)) = link.split_once(']') else { break };
        plain += before;
        let target = after.strip_prefix('(').and_then(|target| target.split_once(')'));
        if let Some((_, behind)) = target {
            plain += text;
            rest = behind;
        } else if text.starts_with('`') {
            plain += text;
            rest = after;
        } else {
            plain.push('[');
            rest = link;
        }
    }
    plain + rest
}

/// Moves headings one level deeper, but not lines of a diagram that look like headings.
fn deeper(page: &str) -> String {
    let mut in_diagram = false;
    let lines = page.lines().map(|line| {
        in_diagram ^= line.starts_with("```");
        if line.starts_with('#') && !in_diagram { format!("#{line}\n") } else { format!("{line}\n") }
    });
    lines.collect()
}

/// Returns a table with a row for each constant: name, value as written, meaning.
fn limits_table(source: &str) -> String {
    let mut table = "| limit | value | meaning |\n|---|---|---|\n".to_owned();
    let mut meaning = String::new();
    for line in source.lines() {
        if let Some(text) = line.strip_prefix("/// ") {
            meaning = if meaning.is_empty() { text.to_owned() } else { format!("{meaning} {text}") };
        } else if let Some(constant) = line.strip_prefix("pub const ") {
            let (name, value) = constant.trim_end_matches(';').split_once(" = ").unwrap();
            let name = name.split(':').next().unwrap();
            writeln!(table, "| `{name}` | `{value}` | {} |", plain(&meaning)).unwrap();
            meaning.clear();
        }
    }
    table
}

fn page() -> String {
    let mut page = String::from("# The protocol between agents\n\n");
    page += "Made from the documentation of `crates/proto/src`; a test holds the two equal. \
             The messages and their fields are described in `crates/proto/src/message.rs` and below it, \
             their bytes stand in `crates/proto/tests/golden`.\n\n";
    page += &deeper(&module_page(include_str!("../src/lib.rs")));
    for (title, source) in [
        ("Frames", include_str!("../src/frame.rs")),
        ("Pages of memory", include_str!("../src/pages.rs")),
        ("Pages that are sent again", include_str!("../src/delta.rs")),
        ("References", include_str!("../src/reference.rs")),
        ("Pages that arrive after the guest", include_str!("../src/missing_pages.rs")),
        ("Agents and their controller", include_str!("../src/message/fleet.rs")),
        ("Limits on the contents of messages", include_str!("../src/valid.rs")),
    ] {
        write!(page, "\n## {title}\n\n{}", deeper(&module_page(source))).unwrap();
    }
    page += "\n## All limits\n\n";
    page + &limits_table(include_str!("../src/limits.rs"))
}

#[test]
fn the_page_says_what_the_source_says() {
    let page = page();
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(FILE, &page).unwrap();
    }
    let written = std::fs::read_to_string(FILE).unwrap_or_default();
    assert!(written == page, "docs/protocol.md is not what the source says: {}", "run with BLESS=1 and look");
}
