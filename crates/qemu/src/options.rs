//! Values of QEMU's options: `key=value,key=value` and JSON.
//!
//! QEMU writes a comma inside a value as two, allows some first keys to be omitted (`-device e1000`
//! means `driver=e1000`), and accepts a JSON object instead for `-device`, `-blockdev`, `-netdev`
//! and `-object`. [`Value`] parses both, changes single keys, and writes everything else back
//! unchanged.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Map;

/// One part of a `key=value` list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// The key; empty for a first value whose key is implied.
    pub key: String,
    /// The value; `None` for a bare word such as `nowait` or an implied first value's key.
    pub value: Option<String>,
}

/// Value of an option.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Value {
    /// A list of keys and values, in order.
    Items(Vec<Item>),
    /// A JSON object.
    Json(Map<String, serde_json::Value>),
}

impl Value {
    /// Parses the value of an option whose first key, if it may be omitted, is `implied`.
    ///
    /// Text that begins like JSON but is not JSON becomes items: QEMU would refuse it, so a running
    /// one cannot have it.
    pub fn parse(text: &str, implied: Option<&str>) -> Self {
        if text.trim_start().starts_with('{')
            && let Ok(map) = serde_json::from_slice(text.as_bytes())
        {
            return Self::Json(map);
        }
        let mut items = Vec::new();
        for (at, part) in split_commas(text).into_iter().enumerate() {
            match (part.split_once('='), implied) {
                (Some((key, value)), _) if !key.is_empty() => {
                    items.push(Item { key: key.to_owned(), value: Some(value.to_owned()) });
                }
                (_, Some(implied)) if at == 0 => {
                    items.push(Item { key: implied.to_owned(), value: Some(part) });
                }
                _ => items.push(Item { key: part, value: None }),
            }
        }
        Self::Items(items)
    }

    /// Returns the value of a key. In JSON a dot in the key leads into nested objects, so
    /// `file.filename` finds the value that a list spells `file.filename=`. A bare word `x` counts as
    /// `x=on`, `nox` as `x=off`.
    pub fn get(&self, key: &str) -> Option<String> {
        match self {
            // The last one wins, as in QEMU.
            Self::Items(items) => items.iter().rev().find_map(|item| match &item.value {
                Some(value) if item.key == key => Some(value.clone()),
                None if item.key == key => Some("on".to_owned()),
                None if item.key.strip_prefix("no") == Some(key) => Some("off".to_owned()),
                _ => None,
            }),
            Self::Json(map) => {
                let mut parts = key.split('.');
                let mut at = map.get(parts.next()?)?;
                for part in parts {
                    at = at.get(part)?;
                }
                scalar(at)
            }
        }
    }

    /// Returns true if a key is present, or (`host-nodes.0`) anything below it.
    pub fn has(&self, key: &str) -> bool {
        match self {
            Self::Items(items) => items.iter().any(|item| {
                item.key == key || item.key.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'))
            }),
            Self::Json(map) => map.contains_key(key),
        }
    }

    /// Sets a key, in place if it is present, at the end otherwise.
    pub fn set(&mut self, key: &str, value: &str) {
        self.set_json(key, serde_json::Value::String(value.to_owned()));
    }

    /// Like [`set`](Self::set), with a type; lists interpret numbers and words by their text.
    pub fn set_json(&mut self, key: &str, value: serde_json::Value) {
        match self {
            Self::Items(items) => {
                let text = scalar(&value).unwrap_or_else(|| value.to_string());
                let is_it = |item: &&mut Item| item.key == key;
                if let Some(item) = items.iter_mut().rev().find(is_it) {
                    item.value = Some(text);
                } else {
                    items.push(Item { key: key.to_owned(), value: Some(text) });
                }
            }
            Self::Json(map) => {
                let mut at = map;
                let mut rest = key;
                while let Some((head, tail)) = rest.split_once('.') {
                    let next = at.entry(head).or_insert_with(|| serde_json::Value::Object(Map::new()));
                    if !next.is_object() {
                        *next = serde_json::Value::Object(Map::new());
                    }
                    let serde_json::Value::Object(next) = next else { return };
                    at = next;
                    rest = tail;
                }
                at.insert(rest.to_owned(), value);
            }
        }
    }

    /// Removes a key and everything below it (`file` removes `file.filename` too).
    pub fn remove(&mut self, key: &str) {
        match self {
            Self::Items(items) => items.retain(|item| {
                item.key != key
                    && !(item.value.is_none() && item.key.strip_prefix("no") == Some(key))
                    && !item.key.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'))
            }),
            Self::Json(map) => match key.rsplit_once('.') {
                None => {
                    map.remove(key);
                }
                Some((parents, last)) => {
                    let mut at = Some(map);
                    for part in parents.split('.') {
                        at = at.and_then(|map| map.get_mut(part)).and_then(|v| v.as_object_mut());
                    }
                    if let Some(map) = at {
                        map.remove(last);
                    }
                }
            },
        }
    }

    /// Calls `change` with the full key and the value of every text; a returned value replaces it.
    pub fn map_texts(&mut self, change: &mut impl FnMut(&str, &str) -> Option<String>) {
        match self {
            Self::Items(items) => {
                for item in items {
                    if let Some(value) = &mut item.value
                        && let Some(new) = change(&item.key, value)
                    {
                        *value = new;
                    }
                }
            }
            Self::Json(map) => map_json(map, "", change),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(map) => {
                let text = serde_json::to_string(map).map_err(|_| fmt::Error)?;
                f.write_str(&text)
            }
            Self::Items(items) => {
                for (at, item) in items.iter().enumerate() {
                    if at > 0 {
                        f.write_str(",")?;
                    }
                    match &item.value {
                        Some(value) => write!(f, "{}={}", item.key, value.replace(',', ",,"))?,
                        None => f.write_str(&item.key.replace(',', ",,"))?,
                    }
                }
                Ok(())
            }
        }
    }
}

fn map_json(
    map: &mut Map<String, serde_json::Value>,
    prefix: &str,
    change: &mut impl FnMut(&str, &str) -> Option<String>,
) {
    for (key, value) in map {
        let full = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            serde_json::Value::String(text) => {
                if let Some(new) = change(&full, text) {
                    *text = new;
                }
            }
            serde_json::Value::Object(inner) => map_json(inner, &full, change),
            _ => {}
        }
    }
}

/// Returns a JSON scalar in the spelling of QEMU's option lists.
fn scalar(value: &serde_json::Value) -> Option<String> {
    match value {
        serde_json::Value::String(text) => Some(text.clone()),
        serde_json::Value::Bool(true) => Some("on".to_owned()),
        serde_json::Value::Bool(false) => Some("off".to_owned()),
        serde_json::Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Splits at commas, and turns doubled commas into single ones.
fn split_commas(text: &str) -> Vec<String> {
    let mut parts = Vec::new();
    let mut part = String::new();
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter != ',' {
            part.push(letter);
        } else if letters.peek() == Some(&',') {
            letters.next();
            part.push(',');
        } else {
            parts.push(std::mem::take(&mut part));
        }
    }
    if !part.is_empty() || parts.is_empty() {
        parts.push(part);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_changed_and_written() {
        let mut value = Value::parse("virtio-blk-pci,drive=d0,id=a,,b,nowait", Some("driver"));
        assert_eq!(value.get("driver").as_deref(), Some("virtio-blk-pci"));
        assert_eq!(value.get("id").as_deref(), Some("a,b"));
        assert_eq!(value.get("wait").as_deref(), Some("off"));
        assert_eq!(value.get("nothing"), None);
        value.set("addr", "5");
        value.set("drive", "d1");
        value.remove("wait");
        assert_eq!(value.to_string(), "driver=virtio-blk-pci,drive=d1,id=a,,b,addr=5");
        let mut value = Value::parse("file.driver=file,file.filename=x,filet=1", None);
        value.remove("file");
        assert_eq!(value.to_string(), "filet=1");
    }

    #[test]
    fn json_is_read_changed_and_written() {
        let mut value =
            Value::parse(r#"{"driver":"qcow2","file":{"filename":"a","direct":true},"n":3}"#, None);
        assert_eq!(value.get("file.filename").as_deref(), Some("a"));
        assert_eq!(value.get("file.direct").as_deref(), Some("on"));
        assert_eq!(value.get("n").as_deref(), Some("3"));
        value.set("file.filename", "b");
        value.set_json("cache.direct", true.into());
        value.remove("n");
        value.remove("file.direct");
        value.map_texts(&mut |key, text| (key == "file.filename").then(|| format!("/x/{text}")));
        assert_eq!(
            value.to_string(),
            r#"{"cache":{"direct":true},"driver":"qcow2","file":{"filename":"/x/b"}}"#
        );
    }

    proptest::proptest! {
        #[test]
        fn values_are_written_back_unchanged(items in proptest::collection::vec(("[a-z]{1,5}", "[a-z,=]{0,6}"), 1..5)) {
            let value = Value::Items(items.into_iter().map(|(key, value)| Item { key, value: Some(value) }).collect());
            proptest::prop_assert_eq!(Value::parse(&value.to_string(), None), value);
        }

        #[test]
        fn no_text_panics(text in ".{0,100}") {
            let mut value = Value::parse(&text, Some("driver"));
            value.remove("a.b");
            value.set("a.b", "c");
            proptest::prop_assert_eq!(value.get("a.b"), Some("c".to_owned()));
        }
    }
}
