//! Checks that no modules of a crate use one another in a circle, neither directly nor through others.
//!
//! Reads the sources: `crate::…` names another module of the crate, directly or by what the crate's root re-exports;
//! `super::…` names one in the same folder or above. The modules of each folder are compared, each with all that is
//! below it. A module and those below it belong together, and may name one another. Comments and tests do not count.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod sources;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use sources::{sources, without_comments};

/// Uses between modules: each module with those that it names.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// Returns the text without comments, and without tests at its end.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    without_comments(text)
}

fn identifier(text: &str) -> &str {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap_or_default()
}

/// Returns the first names of paths like `name::…` or `{name, name::…}`.
fn names(path: &str) -> Vec<&str> {
    match path.strip_prefix('{') {
        None => vec![identifier(path)],
        Some(list) => list
            .split('}')
            .next()
            .unwrap_or_default()
            .split(',')
            .map(|name| identifier(name.trim()))
            .collect(),
    }
}

/// Returns the module from which the crate's root re-exports each name.
fn re_exports(root: &str) -> BTreeMap<&str, &str> {
    let uses = root.split("use ").skip(1).filter_map(|rest| rest.split(';').next()?.split_once("::"));
    uses.flat_map(|(module, items)| names(items).into_iter().map(move |item| (item, module))).collect()
}

fn uses_of(source: &Path) -> Uses {
    let root = ["lib.rs", "main.rs"].map(|name| source.join(name)).into_iter().find(|path| path.exists());
    let root = code(&root.unwrap());
    let re_exported = re_exports(&root);
    let mut uses = Uses::new();
    for path in sources(source) {
        let inside = path.strip_prefix(source).unwrap();
        let is_test =
            inside.iter().any(|part| ["tests", "tests.rs", "testing.rs"].iter().any(|name| part == *name));
        let module = inside.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs").to_owned();
        if is_test || ["lib", "main", "bin"].contains(&&*module) {
            continue;
        }
        let code = code(&path);
        let named = code.split("crate::").skip(1).flat_map(names);
        let of = uses.entry(module).or_default();
        of.extend(named.map(|name| (*re_exported.get(name).unwrap_or(&name)).to_owned()));
    }
    uses
}

/// Returns the paths that a text after `crate::` or `super::` names, with the names before them.
fn expanded(before: &[String], tree: &str) -> Vec<Vec<String>> {
    let tree = tree.trim();
    if let Some(list) = tree.strip_prefix('{') {
        return parts(list).into_iter().flat_map(|part| expanded(before, part)).collect();
    }
    let name = identifier(tree);
    let path = [before, &[name.to_owned()]].concat();
    match tree[name.len()..].strip_prefix("::") {
        Some(rest) if !name.is_empty() => expanded(&path, rest),
        _ => vec![path],
    }
}

/// Returns the parts between the commas of a list, up to its closing brace.
fn parts(list: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0_u32, 0);
    for (at, letter) in list.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => {
                parts.push(&list[start..at]);
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.into_iter().filter(|part| !part.trim().is_empty()).collect()
}

/// Returns the paths that the code of a module names.
fn named_paths(module: &[String], code: &str) -> Vec<Vec<String>> {
    let by_root = code.split("crate::").skip(1).flat_map(|rest| expanded(&[], rest));
    let by_parent = code.match_indices("super::").filter_map(|(at, _)| {
        let steps = code[at..].split("::").take_while(|name| *name == "super").count();
        // The first `super::` of several counts for all.
        let is_first = !code[..at].ends_with("super::");
        let before = module.len().checked_sub(steps).filter(|_| is_first)?;
        Some(expanded(&module[..before], &code[at + steps * "super::".len()..]))
    });
    by_root.chain(by_parent.flatten()).collect()
}

/// Returns the uses between the modules of each folder, by the folder's path.
fn uses_in_folders(source: &Path) -> BTreeMap<Vec<String>, Uses> {
    let modules: BTreeMap<Vec<String>, PathBuf> = sources(source)
        .into_iter()
        .map(|path| {
            let inside = path.strip_prefix(source).unwrap().with_extension("");
            let mut names: Vec<_> = inside.iter().map(|name| name.to_str().unwrap().to_owned()).collect();
            names.pop_if(|last| ["mod", "lib", "main"].contains(&&**last));
            (names, path)
        })
        .filter(|(names, _)| !names.iter().any(|name| ["tests", "testing", "bin"].contains(&&**name)))
        .collect();
    let mut folders: BTreeMap<Vec<String>, Uses> = BTreeMap::new();
    for (module, path) in &modules {
        for mut named in named_paths(module, &code(path)) {
            while !modules.contains_key(&named) {
                named.pop();
            }
            let common = module.iter().zip(&named).take_while(|(one, other)| one == other).count();
            if let (Some(user), Some(used)) = (module.get(common), named.get(common)) {
                let uses = folders.entry(module[..common].to_vec()).or_default();
                uses.entry(used.clone()).or_default();
                uses.entry(user.clone()).or_default().insert(used.clone());
            }
        }
    }
    folders
}

/// Returns a way from a module back to itself, if there is one.
fn circle(uses: &Uses) -> Option<Vec<String>> {
    fn walk(uses: &Uses, way: &mut Vec<String>, done: &mut BTreeSet<String>) -> bool {
        let here = way.last().unwrap().clone();
        for next in
            uses.get(&here).into_iter().flatten().filter(|next| **next != here && uses.contains_key(*next))
        {
            if way.contains(next) {
                way.push(next.clone());
                return true;
            }
            if !done.contains(next) {
                way.push(next.clone());
                if walk(uses, way, done) {
                    return true;
                }
                way.pop();
            }
        }
        done.insert(here);
        false
    }
    let mut done = BTreeSet::new();
    uses.keys().find_map(|module| {
        let mut way = vec![module.clone()];
        walk(uses, &mut way, &mut done).then_some(way)
    })
}

#[test]
fn no_modules_use_one_another_in_a_circle() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let crates = fs::read_dir(workspace.join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let others = ["lab", "bin/whimbrel", "bin/whimbrel-guest"].map(|name| workspace.join(name));
    for path in crates.chain(others) {
        let uses = uses_of(&path.join("src"));
        assert_eq!(circle(&uses), None, "in {}", path.display());
    }
}

#[test]
fn no_files_of_a_folder_use_one_another_in_a_circle() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let crates = fs::read_dir(workspace.join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let others = ["lab", "bin/whimbrel", "bin/whimbrel-guest"].map(|name| workspace.join(name));
    for path in crates.chain(others) {
        for (folder, uses) in uses_in_folders(&path.join("src")) {
            assert_eq!(circle(&uses), None, "in {folder:?} of {}", path.display());
        }
    }
}

/// Each host carries one of them out, by another version perhaps: what both need is beside them.
#[test]
fn the_two_roles_of_a_migration_do_not_use_one_another() {
    let drivers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../migrate/src");
    for (role, other) in [("source", "destination"), ("destination", "source")] {
        let uses = uses_of(&drivers);
        assert!(!uses[role].contains(other), "migrate::{role} uses migrate::{other}");
    }
}

#[test]
fn paths_are_understood() {
    let module = ["a", "b", "c"].map(str::to_owned);
    let code = "use super::d::{e::F, self as g, h::{I, J}};\nuse crate::k;\nsuper::super::l()";
    let found: Vec<_> = named_paths(&module, code).iter().map(|path| path.join("/")).collect();
    assert_eq!(found, ["k", "a/b/d/e/F", "a/b/d/self", "a/b/d/h/I", "a/b/d/h/J", "a/l"]);
}

#[test]
fn a_circle_is_found() {
    let uses = |pairs: &[(&str, &[&str])]| -> Uses {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        pairs.iter().map(|(module, names)| ((*module).to_owned(), owned(names))).collect()
    };
    assert_eq!(circle(&uses(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &["c", "elsewhere"])])), None);
    let found = circle(&uses(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"])])).unwrap();
    assert_eq!(found, ["a", "b", "c", "b"]);
}
