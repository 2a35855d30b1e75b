# The pinned llama.cpp tree as imported targets: llama_cpp::ggml (ggml, its CPU backend, the backend interface) and
# llama_cpp::llama (libllama, llama-common and the server library). The tree is used as it was built, never changed.

# Another pin or other flags mean another tree.
set_property(DIRECTORY ${CMAKE_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS scripts/deps)

if(NOT SLUICE_LLAMA_CPP)
  execute_process(COMMAND ${CMAKE_SOURCE_DIR}/scripts/deps OUTPUT_VARIABLE deps_output RESULT_VARIABLE deps_result
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(deps_result)
    message(FATAL_ERROR "scripts/deps failed; run it by hand, or give -DSLUICE_LLAMA_CPP=DIR")
  endif()
  string(REGEX REPLACE ".*\n" "" SLUICE_LLAMA_CPP_TREE "${deps_output}")
else()
  get_filename_component(SLUICE_LLAMA_CPP_TREE "${SLUICE_LLAMA_CPP}" ABSOLUTE)
endif()

set(llama_bin ${SLUICE_LLAMA_CPP_TREE}/build/bin)
foreach(needed include/llama.h ggml/include/ggml.h ggml/src/ggml-backend-impl.h common/common.h)
  if(NOT EXISTS ${SLUICE_LLAMA_CPP_TREE}/${needed})
    message(FATAL_ERROR "no llama.cpp tree in '${SLUICE_LLAMA_CPP_TREE}': ${needed} is missing")
  endif()
endforeach()

# build/llama.cpp leads to the tree; its bin/ holds the tools.
file(MAKE_DIRECTORY ${CMAKE_SOURCE_DIR}/build)
file(MAKE_DIRECTORY ${CMAKE_SOURCE_DIR}/build)
file(CREATE_LINK ${SLUICE_LLAMA_CPP_TREE} ${CMAKE_SOURCE_DIR}/build/llama.cpp SYMBOLIC)

function(sluice_import target library)
  add_library(${target} SHARED IMPORTED)
  find_library(${target}_path NAMES ${library} PATHS ${llama_bin} NO_DEFAULT_PATH NO_CACHE REQUIRED)
  set_target_properties(${target} PROPERTIES IMPORTED_LOCATION ${${target}_path})
endfunction()

sluice_import(llama_cpp_ggml_base ggml-base)
sluice_import(llama_cpp_ggml_cpu ggml-cpu)
sluice_import(llama_cpp_ggml_main ggml)
sluice_import(llama_cpp_llama_main llama)
sluice_import(llama_cpp_common llama-common)
sluice_import(llama_cpp_server llama-server-impl)

add_library(llama_cpp_ggml INTERFACE)
target_include_directories(llama_cpp_ggml SYSTEM INTERFACE ${SLUICE_LLAMA_CPP_TREE}/ggml/include ${SLUICE_LLAMA_CPP_TREE}/ggml/src)
target_link_libraries(llama_cpp_ggml INTERFACE llama_cpp_ggml_main llama_cpp_ggml_cpu llama_cpp_ggml_base)
target_compile_definitions(llama_cpp_ggml INTERFACE GGML_SHARED GGML_BACKEND_SHARED)
add_library(llama_cpp::ggml ALIAS llama_cpp_ggml)

add_library(llama_cpp_llama INTERFACE)
# Not the tree's vendor/ folder: its nlohmann/json is another version than ours, and the two must not meet in one program.
target_include_directories(llama_cpp_llama SYSTEM INTERFACE ${SLUICE_LLAMA_CPP_TREE}/include ${SLUICE_LLAMA_CPP_TREE}/common)
target_link_libraries(llama_cpp_llama INTERFACE llama_cpp_common llama_cpp_llama_main llama_cpp_ggml)
target_compile_definitions(llama_cpp_llama INTERFACE LLAMA_SHARED)
add_library(llama_cpp::llama ALIAS llama_cpp_llama)

list(APPEND CMAKE_BUILD_RPATH ${llama_bin})
