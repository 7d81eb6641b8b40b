//! Checks that no struct of the libraries has more fields than a reader can keep in mind, and that no file is too long.
//!
//! Reads the sources, tests included. clippy has the limit on the length of functions (`clippy.toml`), and none on
//! fields and files.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod sources;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use sources::{sources, without_comments};

/// Maximum number of a struct's fields.
const MOST_FIELDS: usize = 15;
/// Maximum number of a file's lines.
const MOST_LINES: usize = 500;

/// Structs that have more fields, by file and name. The list may only become shorter.
const TOO_LARGE: &[(&str, &str)] = &[
    // Records that users, files or QEMU show as a whole.
    ("crates/api/src/progress.rs", "Progress"),
    ("crates/api/src/report.rs", "Report"),
    ("crates/api/src/report/round.rs", "Round"),
    ("crates/host/src/config.rs", "Config"),
    ("crates/host/src/config/file.rs", "ConfigFile"),
    ("crates/qemu/src/describe.rs", "Disk"),
    ("crates/qemu/src/describe/live.rs", "LiveState"),
];

/// Returns the fields of a struct, from the text after its name. Commas within brackets of any kind separate no fields.
fn fields(declaration: &str) -> usize {
    let (mut fields, mut depth, mut field, mut before) = (0, 0, false, ' ');
    let opening = declaration.find(['{', '(', ';']).unwrap_or(declaration.len());
    for letter in declaration[opening..].chars() {
        match letter {
            ';' if depth == 0 => break,
            '>' if before == '-' => {}
            '{' | '(' | '[' | '<' => depth += 1,
            '}' | ')' | ']' | '>' => depth -= 1,
            ',' if depth == 1 => {
                fields += usize::from(field);
                field = false;
            }
            letter if depth == 1 && letter.is_alphanumeric() => field = true,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        before = letter;
    }
    fields + usize::from(field)
}

/// Returns the structs that a text declares, with the numbers of their fields.
fn structs(text: &str) -> Vec<(String, usize)> {
    let code = without_comments(text);
    let mut found = Vec::new();
    for (at, keyword) in code.match_indices("struct ") {
        let is_word = code[..at].chars().next_back().is_none_or(char::is_whitespace);
        let rest = &code[at + keyword.len()..];
        let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(rest.len());
        if is_word && rest.starts_with(char::is_uppercase) {
            found.push((rest[..end].to_owned(), fields(&rest[end..])));
        }
    }
    found
}

#[test]
fn no_struct_has_too_many_fields() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let crates = fs::read_dir(workspace.join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let mut found = BTreeMap::new();
    for path in crates.flat_map(|path| sources(&path.join("src"))) {
        let name = path.strip_prefix(&workspace).unwrap().display().to_string();
        for (declared, fields) in structs(&fs::read_to_string(&path).unwrap()) {
            if fields > MOST_FIELDS {
                found.insert((name.clone(), declared), fields);
            }
        }
    }
    let known = |(file, name): &(String, String)| TOO_LARGE.contains(&(file.as_str(), name.as_str()));
    let new: Vec<_> = found.iter().filter(|(at, _)| !known(at)).collect();
    assert!(new.is_empty(), "split structs with more than {MOST_FIELDS} fields: {new:?}");
    let listed = TOO_LARGE.iter().map(|(file, name)| ((*file).to_owned(), (*name).to_owned()));
    let mended: Vec<_> = listed.filter(|at| !found.contains_key(at)).collect();
    assert!(mended.is_empty(), "remove from TOO_LARGE what is small enough now: {mended:?}");
}

#[test]
fn no_file_has_too_many_lines() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = ["crates", "bin", "lab", "guest", "examples", "benches"].map(|name| workspace.join(name));
    let lines = |path: &Path| fs::read_to_string(path).unwrap().lines().count();
    let files = folders.iter().flat_map(|folder| sources(folder));
    let long: Vec<_> = files.filter(|path| lines(path) > MOST_LINES).collect();
    assert!(long.is_empty(), "split files with more than {MOST_LINES} lines: {long:?}");
}

#[test]
fn fields_of_all_kinds_of_structs_are_counted() {
    let text = "
        struct Empty;
        // struct Comment { a: u8 }
        pub(crate) struct Pair<A, B>(A, BTreeMap<A, (B, u8)>);
        struct Named<T: Ord>
        where
            T: Copy,
        {
            /// One, two.
            #[serde(default, rename = \"one\")]
            pub one: [Vec<T>; 2],
            two: Box<dyn Fn(u8, u8) -> (T, T)>,
            pub(in crate::a) three: u8,
        }
        struct Last { only: u8 }";
    let expected = [("Empty", 0), ("Pair", 2), ("Named", 3), ("Last", 1)];
    assert_eq!(structs(text), expected.map(|(name, fields)| (name.to_owned(), fields)));
}
